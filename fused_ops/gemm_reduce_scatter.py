"""GEMM + ReduceScatter: the row-parallel linear under sequence parallelism (Korthikanti et al., arXiv 2205.05198), fused.

As `gemm_all_reduce`, but each rank keeps its own rows of the sum only. Its backward is `all_gather_gemm`.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.dispatch import choose
from fused_ops.effects import TAGS, register_ordered
from fused_ops.gemm_inputs import check_one_device, in_own_dtype
from fused_ops.policy import Call, bucket
from fused_ops.symmetric.group import context, group_name, resolve

OPERATOR = "gemm_reduce_scatter"


def gemm_reduce_scatter(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor:
    """This rank's rows of the sum over ranks r of input_r @ weight_r^T, plus bias once.

    Per rank (W ranks in the group; float32, bfloat16 or float16, the same for all tensors):
        input: [M, K_r]; M is the same on all ranks, may be 0. K_r may differ between ranks, and may be 0.
        weight: [N, K_r], of any strides.
        bias: [N] or None, replicated.
        returns [M_r, N] in input's dtype: rows in rank order, M split as evenly as whole rows allow, the first M % W ranks
            having one more. It is the caller's: no later call changes it.

    Fused, partial sums travel and are added in float32, in rank order, and are rounded once.

    backward, with G [M, N] the gradients of all ranks' rows, which one `all_gather_gemm` gathers:
        input: G @ weight; weight: G^T @ input; bias: the sum of G's rows, so the same on all ranks.
    channel, comm, require_fused: as of `gemm_all_reduce`.

    Raises ValueError (shapes, dtypes, or ranks that disagree) before data moves; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    return torch.ops.fused_ops.gemm_reduce_scatter(input, weight, bias, group_name(group), channel, comm, require_fused)


@torch.library.custom_op("fused_ops::gemm_reduce_scatter", mutates_args=(), tags=TAGS)
def _gemm_reduce_scatter(
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
            return backend.gemm_reduce_scatter(input, weight, bias, ctx, channel)

    def describe() -> Call:
        shape = f"{bucket(input.shape[:1].numel(), 'rows')}, {bucket(weight.shape[:1].numel(), 'columns')}"
        return Call(shape, input.dtype, channel, load=weight.numel(), run=run)

    return run(choose(OPERATOR, comm, require_fused, input.device, ctx, describe=describe))


@_gemm_reduce_scatter.register_fake
def _(input, weight, bias, group, channel, comm, require_fused):
    check_one_device(OPERATOR, input=input, weight=weight, bias=bias)
    ranks = resolve(group)
    rows = (input.shape[0] + ranks.size() - 1 - ranks.rank()) // ranks.size()  # split_evenly, of a symbolic number too
    return input.new_empty((rows, weight.shape[0]))


def _save(ctx, inputs, output):
    input, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(input, weight)
    ctx.has_bias = bias is not None


def _backward(ctx, grad):
    input, weight = ctx.saved_tensors
    wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    wants_all = wants_weight or wants_bias
    # All ranks take part, whatever each wants of it.
    grad_input, gathered = torch.ops.fused_ops.all_gather_gemm(
        grad, weight.t(), None, input.shape[0], wants_all, False, *ctx.options
    )
    grad_weight = gathered.t() @ input if wants_weight else None
    grad_bias = gathered.sum(0) if ctx.has_bias and wants_bias else None
    return grad_input if wants_input else None, grad_weight, grad_bias, None, None, None, None


_gemm_reduce_scatter.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::gemm_reduce_scatter")
