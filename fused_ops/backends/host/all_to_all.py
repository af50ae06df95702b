"""All-to-All on a CPU host: each slice is copied once, straight to its place in the receiver's output."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from torch import Tensor

from fused_ops.all_to_all import check_splits
from fused_ops.symmetric.agreement import Result, int64_array, library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import Incoming, host_channel


def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: GroupContext,
    channel: int,
    layout: tuple[str, ...] | None = None,
) -> Tensor:
    """See `fused_ops.all_to_all`. `layout`: facts that all ranks share and that imply everybody's splits; ranks then compare
    these, once, instead of reading each other's splits in every call."""
    lane = host_channel(group, channel)
    with lane.agreement.call("all_to_all") as call:
        send, receive = check_splits(input, output_splits, input_splits, group.world)
        even = output_splits is None and input_splits is None
        trailing = tuple(input.shape[1:])
        facts = (
            "all_to_all",
            str(input.dtype),
            f"trailing shape {trailing}",
            *(layout or [f"{send[0]} rows to each" if even else "given splits"]),
        )
        tag, _ = lane.agreement.agree(facts, None if even or layout else [*send, *receive])
        source = input.contiguous()
        row_bytes = input.element_size() * math.prod(trailing)
        outgoing = Incoming.packed([rows * row_bytes for rows in send])
        incoming = Incoming.packed([rows * row_bytes for rows in receive])
        with lane.receive(tag, incoming) as receipt:
            result = Result()
            library().fo_all_to_all(
                lane.handle,
                ctypes.c_int64(call),
                ctypes.c_uint32(tag),
                ctypes.c_void_p(source.data_ptr()),
                int64_array(outgoing.offsets),
                int64_array(outgoing.bytes),
                ctypes.c_void_p(receipt.address + incoming.offsets[group.rank]),
                ctypes.byref(result),
            )
            lane.finish(result)
            return receipt.tensor((sum(receive), *trailing), input.dtype)
