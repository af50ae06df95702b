"""All-to-All over symmetric memory: the exchange alone, without a computation.

It proves the protocol that the fused operators run on, and it is their honest unfused column: the same compute followed by
*this* exchange is what fusing is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.dispatch import choose
from fused_ops.effects import TAGS, register_ordered
from fused_ops.policy import Call, bucket
from fused_ops.symmetric.group import context, group_name


def all_to_all(
    input: Tensor,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor:
    """Send rows to every rank and receive rows from every rank, as `torch.distributed.all_to_all_single` does.

    Per rank (W ranks in the group):
        input: [sum(input_splits), *trailing]; any dtype of fixed width; not changed.
        input_splits: W row counts, one a destination; None splits dim 0 evenly (it must divide by W).
        output_splits: W row counts, one a source; None = even.
        returns [sum(output_splits), *trailing], rows in source order. It is the caller's: no later call changes it.

    backward: the same exchange of the gradient with the two split lists swapped.
    channel: calls on one channel of a group are issued in the same order on every rank; use another for an exchange that
        overlaps this one. Baseline has no channels: where it may run, all channels of a group share one order.
    comm: "fused" (the native backend), "baseline" (`all_to_all_single`), "auto" (the faster of both, measured once for each
        dtype and power of two of bytes; with given splits, whose sizes a rank alone knows, once for each dtype), or a
        backend's name.

    Raises ValueError (shape, splits, or ranks that disagree) before data moves; PeerTimeoutError, PeerLostError or
    PeerAbortedError when a peer does not take part; BackendUnavailableError under `require_fused`.
    """
    return torch.ops.fused_ops.all_to_all(
        input,
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
        group_name(group),
        channel,
        comm,
        require_fused,
    )


@torch.library.custom_op("fused_ops::all_to_all", mutates_args=(), tags=TAGS)
def _all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> Tensor:
    ctx = context(group)

    def run(backend: ModuleType) -> Tensor:
        return backend.all_to_all(input, output_splits, input_splits, ctx, channel)

    def describe() -> Call:
        sent = input.numel() * input.element_size()
        if input_splits is None and output_splits is None:
            return Call(bucket(sent, "bytes a rank"), input.dtype, channel, run=run)
        # No rank knows what the others send: the first call of a dtype stands for all, and only the name on disk tells.
        return Call("given splits", input.dtype, channel, load=sent, run=run)

    return run(choose("all_to_all", comm, require_fused, input.device, ctx, describe=describe))


@_all_to_all.register_fake
def _(input, output_splits, input_splits, group, channel, comm, require_fused):
    rows = input.shape[0] if output_splits is None else sum(output_splits)
    return input.new_empty((rows, *input.shape[1:]))


def _save_splits(ctx, inputs, output):
    _, ctx.output_splits, ctx.input_splits, ctx.group, ctx.channel, ctx.comm, ctx.require_fused = inputs


def _backward(ctx, grad):
    swapped = torch.ops.fused_ops.all_to_all(
        grad, ctx.input_splits, ctx.output_splits, ctx.group, ctx.channel, ctx.comm, ctx.require_fused
    )
    return swapped, None, None, None, None, None, None


_all_to_all.register_autograd(_backward, setup_context=_save_splits)
register_ordered("fused_ops::all_to_all")


def check_splits(
    input: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None, world: int
) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each rank), or ValueError for what this rank alone can see."""
    if input.layout != torch.strided or input.is_quantized:
        kind = "a quantized" if input.is_quantized else f"a {input.layout}"
        raise ValueError(f"all_to_all: input must be a plain strided tensor, got {kind} one")
    if input.dim() == 0:
        raise ValueError("all_to_all: input must have at least one dimension, got a scalar")
    rows = input.shape[0]
    if (input_splits is None or output_splits is None) and rows % world and input_splits is None:
        raise ValueError(
            f"all_to_all: {rows} rows do not divide evenly over {world} ranks; pass input_splits and output_splits"
        )
    send = [rows // world] * world if input_splits is None else list(input_splits)
    receive = [rows // world] * world if output_splits is None else list(output_splits)
    for name, splits in (("input_splits", send), ("output_splits", receive)):
        if len(splits) != world:
            raise ValueError(f"all_to_all: {name} needs one entry a rank ({world}), got {len(splits)}")
        if any(s < 0 for s in splits):
            raise ValueError(f"all_to_all: {name} must not be negative, got {splits}")
    if sum(send) != rows:
        raise ValueError(f"all_to_all: input_splits sum to {sum(send)}, but input has {rows} rows")
    if input_splits is not None and output_splits is None and rows % world:
        raise ValueError(
            f"all_to_all: output_splits is needed with input_splits where {rows} rows do not divide over {world} ranks"
        )
    return send, receive
