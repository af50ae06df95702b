"""AllGather + GEMM: the column-parallel linear under sequence parallelism (Korthikanti et al., arXiv 2205.05198), fused.

Each rank holds some rows of the input and some columns of the output. Its backward is `gemm_reduce_scatter`.
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
from fused_ops.symmetric.group import context, group_name

OPERATOR = "all_gather_gemm"


def all_gather_gemm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    total_rows: int | None = None,
    return_gathered: bool = False,
    save_gathered: bool = True,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """gathered @ weight_r^T + bias_r, where `gathered` is all ranks' rows of the input in rank order.

    Per rank (W ranks in the group; float32, bfloat16 or float16, the same for all tensors):
        input: [M_r, K]; K is the same on all ranks. M rows are split as evenly as whole rows allow, the first M % W ranks
            having one more (what `gemm_reduce_scatter` gives).
        weight: [N_r, K], of any strides; N_r may differ between ranks, and may be 0.
        bias: [N_r] or None; on all ranks or on none.
        total_rows: M, the same on all ranks. None: ranks ask each other in every call, one small exchange more; under
            torch.compile it must be given.
        returns [M, N_r], and with `return_gathered` also [M, K], in input's dtype. They are the caller's: no later call
            changes them. (With `save_gathered` backward reads the latter: change a copy.)

    backward, with G [M, N_r] the output's gradient on this rank:
        input: this rank's rows of the sum over ranks of G @ weight, by `gemm_reduce_scatter`; weight: G^T @ gathered; bias:
            the sum of G's rows. A gradient of what `return_gathered` returned is added up the same way, so that all ranks
            must make use of the same outputs.
    save_gathered: keep the gathered input, M x K, for the weight's gradient; False keeps this rank's rows only and gathers
        again in backward, where every rank's weight must want a gradient, or none.
    channel, comm, require_fused: as of `gemm_all_reduce`. "auto" measures once for each dtype and power of two of M and K
        (of K, where ranks ask each other for M): N_r is known to its rank alone.

    Raises ValueError (shapes, dtypes, or ranks that disagree) before data moves; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    keep = return_gathered or save_gathered
    output, gathered = torch.ops.fused_ops.all_gather_gemm(
        input, weight, bias, total_rows, keep, save_gathered, group_name(group), channel, comm, require_fused
    )
    return (output, gathered) if return_gathered else output


@torch.library.custom_op("fused_ops::all_gather_gemm", mutates_args=(), tags=TAGS)
def _all_gather_gemm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    total_rows: int | None,
    keep_gathered: bool,
    save_gathered: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> tuple[Tensor, Tensor]:
    """(output, gathered); gathered is [0, K] unless `keep_gathered`."""
    ctx = context(group)

    def run(backend: ModuleType) -> tuple[Tensor, Tensor]:
        with in_own_dtype(input.device):
            output, gathered = backend.all_gather_gemm(input, weight, bias, total_rows, ctx, channel)
        return output, gathered if keep_gathered else gathered.new_empty(0, gathered.shape[1])

    def describe() -> Call:
        rows = "any rows" if total_rows is None else bucket(max(total_rows, 0), "rows")
        return Call(f"{rows}, {bucket(input.shape[-1:].numel(), 'inner')}", input.dtype, channel, weight.numel(), run)

    return run(choose(OPERATOR, comm, require_fused, input.device, ctx, describe=describe))


@_all_gather_gemm.register_fake
def _(input, weight, bias, total_rows, keep_gathered, save_gathered, group, channel, comm, require_fused):
    check_one_device(OPERATOR, input=input, weight=weight, bias=bias)
    rows = torch.library.get_ctx().new_dynamic_size() if total_rows is None else total_rows
    output = input.new_empty((rows, weight.shape[0]))
    return output, input.new_empty((rows if keep_gathered else 0, input.shape[1]))


def _save(ctx, inputs, output):
    input, weight, bias, _, ctx.keep_gathered, ctx.save_gathered, *ctx.options = inputs
    ctx.save_for_backward(output[1] if ctx.save_gathered else input, weight)
    ctx.has_bias = bias is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_gathered):
    kept, weight = ctx.saved_tensors
    wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    nothing = [None] * 7
    grad_input = grad_weight = grad_bias = None
    if grad is not None:
        rows = grad.shape[0]
        # All ranks take part, whatever each wants of it.
        grad_input = _reduce_scatter(ctx, grad, weight.t())
        if wants_weight:
            gathered = kept if ctx.save_gathered else _gather(ctx, kept, rows)
            grad_weight = grad.t() @ gathered
        grad_bias = grad.sum(0) if ctx.has_bias and wants_bias else None
    if grad_gathered is not None and ctx.keep_gathered:
        unit = torch.eye(grad_gathered.shape[1], dtype=grad_gathered.dtype, device=grad_gathered.device)
        through_gathered = _reduce_scatter(ctx, grad_gathered, unit)
        grad_input = through_gathered if grad_input is None else grad_input + through_gathered
    return grad_input if wants_input else None, grad_weight, grad_bias, *nothing


def _reduce_scatter(ctx, grad: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.fused_ops.gemm_reduce_scatter(grad, weight, None, *ctx.options)


def _gather(ctx, input: Tensor, total_rows: int) -> Tensor:
    """All ranks' rows: a gather for a weight without rows."""
    nothing = input.new_empty(0, input.shape[1])
    _, gathered = torch.ops.fused_ops.all_gather_gemm(input, nothing, None, total_rows, True, False, *ctx.options)
    return gathered


_all_gather_gemm.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::all_gather_gemm")
