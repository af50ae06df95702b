"""GEMM + AllReduce: the row-parallel linear of a tensor-parallel model (Megatron-LM, arXiv 1909.08053), fused.

Each rank holds a slice of the inner dimension, so its product is a partial sum that all ranks need added up before the next
layer can start. Fused, every part of a partial sum is stored straight into the rank that adds it up, as soon as it is
computed (Punniyamurthy et al., arXiv 2305.06942).
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_ops.dispatch import choose
from fused_ops.effects import TAGS, register_ordered
from fused_ops.gemm_inputs import check_one_device, in_own_dtype
from fused_ops.policy import Call, bucket
from fused_ops.symmetric.group import context, group_name

OPERATOR = "gemm_all_reduce"


def gemm_all_reduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor:
    """sum over ranks r of input_r @ weight_r^T, plus bias once.

    Per rank (W ranks in the group; float32, bfloat16 or float16, the same for all tensors):
        input: [..., K_r]; M = the product of its leading dimensions, the same on all ranks, may be 0. K_r may differ
            between ranks, and may be 0.
        weight: [N, K_r], of any strides.
        bias: [N] or None, replicated.
        returns [..., N] in input's dtype, the same bits on all ranks. It is the caller's: no later call changes it.

    Fused, partial sums travel and are added in float32, in rank order, and are rounded once.

    backward (the output's gradient is taken to be the same on all ranks, as the output is; nothing is sent):
        input: grad @ weight; weight: grad^T @ input; bias: the sum of grad's rows.
    channel, comm, require_fused: as of `all_to_all`. "auto" measures once for each dtype and power of two of M and N: K_r is
        known to its rank alone.

    Raises ValueError (shapes, dtypes, or ranks that disagree) before data moves; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    return torch.ops.fused_ops.gemm_all_reduce(input, weight, bias, group_name(group), channel, comm, require_fused)


@torch.library.custom_op("fused_ops::gemm_all_reduce", mutates_args=(), tags=TAGS)
def _gemm_all_reduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> Tensor:
    ctx = context(group)

    def run(backend: ModuleType) -> Tensor:
        with in_own_dtype(input.device):
            return backend.gemm_all_reduce(input, weight, bias, ctx, channel)

    def describe() -> Call:
        shape = f"{bucket(input.shape[:-1].numel(), 'rows')}, {bucket(weight.shape[:1].numel(), 'columns')}"
        return Call(shape, input.dtype, channel, load=weight.numel(), run=run)

    size = input.shape[:-1].numel()
    return run(choose(OPERATOR, comm, require_fused, input.device, ctx, describe=describe, size=size))


@_gemm_all_reduce.register_fake
def _(input, weight, bias, group, channel, comm, require_fused):
    check_one_device(OPERATOR, input=input, weight=weight, bias=bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _save(ctx, inputs, output):
    input, weight, bias = inputs[:3]
    ctx.save_for_backward(input, weight)
    ctx.has_bias = bias is not None


@once_differentiable  # a second derivative would need another sum over ranks
def _backward(ctx, grad):
    input, weight = ctx.saved_tensors
    rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
    wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_input = grad @ weight if wants_input else None
    grad_weight = rows.t() @ input.reshape(rows.shape[0], input.shape[-1]) if wants_weight else None
    grad_bias = rows.sum(0) if ctx.has_bias and wants_bias else None
    return grad_input, grad_weight, grad_bias, None, None, None, None


_gemm_all_reduce.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::gemm_all_reduce")
