"""Grouped GEMM + All-to-All: experts multiply their rows and send the products home, where each token's are added up.

The second half of a Mixture of Experts layer (GShard, arXiv 2006.16668). Fused, each product is stored straight into the rank
that its token is from, remote ranks first (Punniyamurthy et al., arXiv 2305.06942). Its backward is `all_to_all_gemm`.
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
from fused_ops.grouped_gemm import grouped_weight_gradient
from fused_ops.policy import Call, bucket
from fused_ops.symmetric.group import context, group_name

OPERATOR = "gemm_all_to_all"


def gemm_all_to_all(
    input: Tensor,
    weight: Tensor,
    received: Tensor,
    tokens: Tensor,
    counts: Tensor,
    gates: Tensor,
    num_tokens: int,
    *,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor:
    """For each token of this rank the sum of gate times product over its routed rows, products coming from the experts.

    Per rank (W ranks in the group, E experts in all, E_r = E / W of them on each: expert e is on rank e // E_r; float32,
    bfloat16 or float16, the same for input and weight):
        input: [S, F], the rows of this rank's experts, in the order that `all_to_all_gemm` gives; F may differ between ranks.
        weight: [E_r, H, F], of any strides; H is the same on all ranks.
        received: [E_r, W] int64, how many of these rows each local expert has from each rank, as `all_to_all_gemm` gives it.
        tokens, counts: of this rank's own routed rows, [R] and [E] int64, as `all_to_all_gemm` took them.
        gates: [R] in float32 or input's dtype, the factor of each routed row.
        num_tokens: T, may be 0.
        returns [T, H] in input's dtype: output[t] = the sum of gates[r] * y_r over the rows r with tokens[r] == t, zero where
            there is none. It is the caller's: no later call changes it.

    A product y_r = input row @ weight[e]^T is rounded to input's dtype and travels so. Fused, a token's are added in float32,
    in the order of its rows, and the sum is rounded once.

    backward, with G [R, H] the rows gates[r] * grad[tokens[r]], which one `all_to_all_gemm` sends to the experts:
        input: their G @ weight[e]; weight: G^T @ input of each expert, zeros for one without rows; gates: the dot product of
            y_r (kept where the gates want a gradient) and grad[tokens[r]], in float32.
    channel, comm, require_fused: as of `all_to_all_gemm`.

    Raises ValueError (shapes, dtypes, routing, or ranks that disagree) before rows move; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    keep_products = gates.requires_grad and torch.is_grad_enabled()
    output, _ = torch.ops.fused_ops.gemm_all_to_all(
        input,
        weight,
        received,
        tokens,
        counts,
        gates,
        num_tokens,
        keep_products,
        group_name(group),
        channel,
        comm,
        require_fused,
    )
    return output


@torch.library.custom_op("fused_ops::gemm_all_to_all", mutates_args=(), tags=TAGS)
def _gemm_all_to_all(
    input: Tensor,
    weight: Tensor,
    received: Tensor,
    tokens: Tensor,
    counts: Tensor,
    gates: Tensor,
    num_tokens: int,
    keep_products: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> tuple[Tensor, Tensor]:
    """(output, the products of this rank's routed rows); these are [0, H] unless `keep_products`."""
    ctx = context(group)

    def run(backend: ModuleType) -> tuple[Tensor, Tensor]:
        with in_own_dtype(input.device):
            output, products = backend.gemm_all_to_all(
                input, weight, received, tokens, counts, gates, num_tokens, ctx, channel
            )
        return output, products if keep_products else products.new_empty(0, products.shape[1])

    def describe() -> Call:
        shape = f"{counts.numel()} experts, {bucket(weight.shape[1:2].numel(), 'columns')}"
        return Call(shape, input.dtype, channel, load=tokens.numel(), run=run)

    return run(choose(OPERATOR, comm, require_fused, input.device, ctx, describe=describe))


@_gemm_all_to_all.register_fake
def _(
    input,
    weight,
    received,
    tokens,
    counts,
    gates,
    num_tokens,
    keep_products,
    group,
    channel,
    comm,
    require_fused,
):
    check_one_device(OPERATOR, input=input, weight=weight)
    output = input.new_empty((num_tokens, weight.shape[1]))
    return output, input.new_empty((tokens.shape[0] if keep_products else 0, weight.shape[1]))


def _save(ctx, inputs, output):
    input, weight, received, tokens, counts, gates, _, ctx.keep_products, *ctx.options = inputs
    ctx.save_for_backward(input, weight, received, tokens, counts, gates, output[1])
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(ctx, grad, _):
    input, weight, received, tokens, counts, gates, products = ctx.saved_tensors
    wants_input, wants_weight, *_, wants_gates, _ = ctx.needs_input_grad[:7]
    nothing = [None] * 12
    if grad is None:
        return (*nothing,)
    rows = grad[tokens].float()
    weighted = (rows * gates.float().unsqueeze(1)).to(grad.dtype)
    # All ranks take part, whatever each wants of it.
    all_counts, _ = torch.ops.fused_ops.all_to_all_gemm_counts(counts, grad.device, *ctx.options)
    rows_of_grad = torch.arange(tokens.shape[0], device=tokens.device)
    grad_input, dispatched = torch.ops.fused_ops.all_to_all_gemm(
        weighted, weight.transpose(1, 2), rows_of_grad, all_counts, input.shape[0], *ctx.options
    )
    grad_weight = grouped_weight_gradient(dispatched, input, received) if wants_weight else None
    grad_gates = None
    if wants_gates:
        if not ctx.keep_products:
            raise RuntimeError(f"{OPERATOR}: the products were not kept, so the gates have no gradient")
        grad_gates = (products.float() * rows).sum(1).to(gates.dtype)
    nothing[:2], nothing[5] = (grad_input if wants_input else None, grad_weight), grad_gates
    return (*nothing,)


_gemm_all_to_all.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::gemm_all_to_all")
