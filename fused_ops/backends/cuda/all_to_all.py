"""All-to-All on CUDA: one kernel stores every slice straight into the receivers' slots."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.all_to_all import check_splits
from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.cuda_channel import CallParams, cuda_channel
from fused_ops.symmetric.cuda_memory import MAX_RANKS, check_structs
from fused_ops.symmetric.group import GroupContext

Offsets = ctypes.c_int64 * MAX_RANKS


class AllToAllParams(ctypes.Structure):
    """`AllToAllParams` of all_to_all.cu."""

    _fields_ = [
        ("call", CallParams),
        ("input", ctypes.c_void_p),
        ("send_offset", Offsets),
        ("send_bytes", Offsets),
        ("remote_offset", Offsets),
        ("receive_offset", Offsets),
        ("receive_bytes", Offsets),
    ]


def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.all_to_all`."""
    lane = cuda_channel(group, channel, input.device)
    check_structs(lane.lib, {"all_to_all_params": AllToAllParams})
    with torch.cuda.device(input.device), lane.call("all_to_all"):
        send, receive = check_splits(input, output_splits, input_splits, group.world)
        even = output_splits is None and input_splits is None
        trailing = tuple(input.shape[1:])
        facts = (
            "all_to_all",
            str(input.dtype),
            f"trailing shape {trailing}",
            f"{send[0]} rows to each" if even else "given splits",
        )
        tag, rows = lane.agreement.agree(facts, None if even else [*send, *receive])
        # rows_to[s][d]: rows that rank s sends to rank d
        rows_to = [send] * group.world if even else [r[: group.world] for r in rows]
        row_bytes = input.element_size() * math.prod(trailing)
        lane.reserve(max(sum(rows_to[s][d] for s in range(group.world)) for d in range(group.world)) * row_bytes)
        source = input.contiguous()
        output, call = lane.receive(tag, (sum(receive), *trailing), input.dtype)
        params = AllToAllParams(call=call, input=source.data_ptr())
        sent = received = 0
        for r in range(group.world):
            params.send_offset[r], params.send_bytes[r] = sent * row_bytes, send[r] * row_bytes
            params.receive_offset[r], params.receive_bytes[r] = received * row_bytes, receive[r] * row_bytes
            params.remote_offset[r] = sum(rows_to[s][r] for s in range(group.rank)) * row_bytes
            sent += send[r]
            received += receive[r]
        params.call.slices = lane.slices(max(n for row in rows_to for n in row) * row_bytes)
        blocks = num_blocks(_blocks_of_tiles(params, group.world, lane.lib), lane.sms)
        lane.launch_done(lane.lib.fo_cuda_all_to_all(ctypes.byref(params), blocks, lane.stream_pointer()))
        return output


def _blocks_of_tiles(params: AllToAllParams, world: int, lib: ctypes.CDLL) -> int:
    """Blocks that would have one tile a warp."""
    tile_bytes, warps = lib.fo_cuda_all_to_all_tile_bytes(), lib.fo_cuda_all_to_all_warps()
    tiles = sum(-(-params.send_bytes[r] // tile_bytes) for r in range(world))
    return (tiles + world) // warps + 1
