"""All-to-All + grouped GEMM: tokens travel to their experts, which multiply them, as one operator (expert parallelism).

The first half of a Mixture of Experts layer (GShard, arXiv 2006.16668). Fused, each routed row is stored straight into its
place among its expert's rows, so nothing is permuted before or after. Its backward is `gemm_all_to_all`.
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
from fused_ops.symmetric.group import context, group_name, resolve

OPERATOR = "all_to_all_gemm"


def all_to_all_gemm(
    input: Tensor,
    weight: Tensor,
    tokens: Tensor,
    counts: Tensor,
    *,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dispatched @ weight[e]^T for the rows of each expert e of this rank, where `dispatched` is what all ranks send them.

    Per rank (W ranks in the group, E experts in all, E_r = E / W of them on each: expert e is on rank e // E_r; float32,
    bfloat16 or float16, the same for both tensors):
        input: [T, H], this rank's tokens; H is the same on all ranks, T need not be, and may be 0.
        weight: [E_r, F, H], of any strides; F may differ between ranks.
        tokens: [R] int64, which token each routed row is, rows sorted by expert. A token may be routed to several experts, or
            to none.
        counts: [E] int64, on the CPU or the input's device: how many of the routed rows each expert gets.
        returns (output, dispatched, received). dispatched: [S, H], the rows that came, by local expert, then source rank, then
            as the source has them; output: [S, F]; received: [E_r, W] int64 on the CPU, how many rows each local expert has
            from each rank, which sums to S. They are the caller's: no later call changes them.

    backward, with G [S, F] the output's gradient:
        input: for each token the sum of G @ weight[e] over its routed rows, by `gemm_all_to_all` (a gradient of `dispatched` is
            sent home the same way, on all ranks or on none); weight: G^T @ dispatched of each expert, zeros for one without rows.
    Ranks tell each other their counts first, which is counted as `all_to_all_gemm_counts`. Under torch.compile the number of rows
    that came breaks the graph, unless `torch._dynamo.config.capture_scalar_outputs` is set.
    channel, comm, require_fused: as of `gemm_all_reduce`. "auto" measures once for each dtype, number of experts and power of two
        of H: how many rows there are is known to each rank alone.

    Raises ValueError (shapes, dtypes, routing, or ranks that disagree) before rows move; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    options = group_name(group), channel, comm, require_fused
    all_counts, received = torch.ops.fused_ops.all_to_all_gemm_counts(counts, input.device, *options)
    rows = received.sum().item()
    output, dispatched = torch.ops.fused_ops.all_to_all_gemm(input, weight, tokens, all_counts, rows, *options)
    return output, dispatched, received


@torch.library.custom_op("fused_ops::all_to_all_gemm_counts", mutates_args=(), tags=TAGS)
def _all_to_all_gemm_counts(
    counts: Tensor, device: torch.device, group: str, channel: int, comm: str, require_fused: bool
) -> tuple[Tensor, Tensor]:
    """(every rank's counts [W, E], what this rank's experts receive [E_r, W]), on the CPU; `device`: of the rows."""
    ctx = context(group)
    comm = "fused" if comm == "auto" else comm  # to be measured is how the rows travel
    backend = choose(OPERATOR, comm, require_fused, device, ctx, phase="counts")
    all_counts = backend.all_to_all_gemm_counts(counts, device, ctx, channel)
    return all_counts, received_by(all_counts, ctx.rank).clone(memory_format=torch.contiguous_format)


@_all_to_all_gemm_counts.register_fake
def _(counts, device, group, channel, comm, require_fused):
    world, experts = resolve(group).size(), counts.shape[0]
    all_counts = torch.empty((world, experts), dtype=torch.int64, device="cpu")
    return all_counts, all_counts.new_empty((experts // world, world))


register_ordered("fused_ops::all_to_all_gemm_counts")


@torch.library.custom_op("fused_ops::all_to_all_gemm", mutates_args=(), tags=TAGS)
def _all_to_all_gemm(
    input: Tensor,
    weight: Tensor,
    tokens: Tensor,
    all_counts: Tensor,
    rows: int,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> tuple[Tensor, Tensor]:
    """(output, dispatched). rows: S, which follows from `all_counts`; a compiler must know it."""
    ctx = context(group)

    def run(backend: ModuleType) -> tuple[Tensor, Tensor]:
        with in_own_dtype(input.device):
            return backend.all_to_all_gemm(input, weight, tokens, all_counts, ctx, channel)

    def describe() -> Call:
        shape = f"{all_counts.shape[1]} experts, {bucket(input.shape[-1:].numel(), 'columns')}"
        return Call(shape, input.dtype, channel, load=tokens.numel(), run=run)

    return run(choose(OPERATOR, comm, require_fused, input.device, ctx, describe=describe))


@_all_to_all_gemm.register_fake
def _(input, weight, tokens, all_counts, rows, group, channel, comm, require_fused):
    check_one_device(OPERATOR, input=input, weight=weight)
    return input.new_empty((rows, weight.shape[1])), input.new_empty((rows, input.shape[1]))


def _save(ctx, inputs, output):
    input, weight, tokens, all_counts, _, *ctx.options = inputs
    ctx.save_for_backward(output[1], weight, tokens, all_counts)
    ctx.num_tokens = input.shape[0]
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(ctx, grad, grad_dispatched):
    dispatched, weight, tokens, all_counts = ctx.saved_tensors
    rank = resolve(ctx.options[0]).rank()
    received = received_by(all_counts, rank)
    routing = received, tokens, all_counts[rank]
    wants_input, wants_weight = ctx.needs_input_grad[:2]
    grad_input = grad_weight = None
    if grad is not None:
        # All ranks take part, whatever each wants of it.
        grad_input = _send_home(ctx, grad, weight.transpose(1, 2), *routing)
        grad_weight = grouped_weight_gradient(grad, dispatched, received) if wants_weight else None
    if grad_dispatched is not None:
        columns = grad_dispatched.shape[1]
        unit = torch.eye(columns, dtype=grad_dispatched.dtype, device=grad_dispatched.device)
        unit = unit.expand(weight.shape[0], columns, columns)
        through_dispatched = _send_home(ctx, grad_dispatched, unit, *routing)
        grad_input = through_dispatched if grad_input is None else grad_input + through_dispatched
    return grad_input if wants_input else None, grad_weight, *[None] * 7


def _send_home(ctx, grad: Tensor, weight: Tensor, received: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """For each token the sum of its rows of grad @ weight[e]^T."""
    gates = torch.ones(tokens.shape, device=grad.device)
    home, _ = torch.ops.fused_ops.gemm_all_to_all(
        grad, weight, received, tokens, counts, gates, ctx.num_tokens, False, *ctx.options
    )
    return home


_all_to_all_gemm.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::all_to_all_gemm")


def received_by(all_counts: Tensor, rank: int) -> Tensor:
    """[E_r, W]: how many rows each expert of that rank has from each rank, of what all ranks send to each expert, [W, E]."""
    world = all_counts.shape[0]
    return all_counts.view(world, world, all_counts.shape[1] // world)[:, rank].t()
