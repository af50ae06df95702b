"""Calls of the exchange as the host makes them: check, send, finish; and the abort of a call that this rank rejects.

A kernel may be loaded while an earlier one of this rank waits for a peer: what the peer needs of this rank, its credit, was
posted by that earlier kernel already, so the load can only be delayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fused_ops.backends.triton.finish import finish_kernel
from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.triton_channel import Receipt, TritonChannel, triton_channel

NUM_WARPS = 4
LANES = 32 * NUM_WARPS
# Programs that wait for a peer must all be resident, also where ranks that share a card each take their share of its SMs: three
# of 128 threads and 168 registers are what an SM holds.
PROGRAMS_A_SM = 3
MOST_REGISTERS = 168
TILE_ELEMENTS = 2048  # of a program's tile, 16 a thread
WIDEST_BLOCK = 256


@dataclass(frozen=True)
class Sends:
    """The tiles of a send kernel. Tile 0 posts the credits."""

    slices: Tensor  # [world] tiles of each destination
    first_tiles: Tensor  # [world] in sending order: the next rank's, ..., this rank's
    num_tiles: int

    @classmethod
    def plan(cls, lane: TritonChannel, tiles: Sequence[int]) -> Sends:
        """tiles[r]: of the slice for rank r, which is signalled even if nothing is in it."""
        tiles = [max(1, count) for count in tiles]
        order = [(lane.rank + 1 + turn) % lane.world for turn in range(lane.world)]
        starts = list(itertools.accumulate((tiles[r] for r in order), initial=1))
        return cls(lane.constants(tiles), lane.constants(starts[:-1]), starts[-1])


def open_channel(group: GroupContext, channel: int, device: torch.device) -> TritonChannel:
    return triton_channel(group, channel, device, abort)


def persistent_grid(lane: TritonChannel, tiles: int) -> tuple[int]:
    """Programs for a kernel that shares out `tiles`."""
    blocks = num_blocks(triton.cdiv(tiles, PROGRAMS_A_SM), lane.sms)
    return (min(tiles, PROGRAMS_A_SM * blocks),)


def block_of(widest: int, limit: int = WIDEST_BLOCK) -> tuple[int, int]:
    """(rows, columns) of a tile for rows up to `widest` elements wide."""
    columns = min(triton.next_power_of_2(max(widest, 1)), limit)
    return max(1, TILE_ELEMENTS // columns), columns


def link_arguments(lane: TritonChannel, sends: Sends, tag: int, receipt: Receipt) -> dict[str, Any]:
    """What every send kernel takes."""
    return {
        "state": lane.state,
        "record": lane.record,
        "control": lane.control,
        "arenas": lane.arenas.table,
        "slices": sends.slices,
        "first_tiles": sends.first_tiles,
        "own": receipt.slot.address,
        "rank": lane.rank,
        "world": lane.world,
        "tag": tag,
        "place": receipt.slot.place,
        "num_tiles": sends.num_tiles,
        "delay_us": lane.stress_delay_us,
        "LANES": LANES,
        "num_warps": NUM_WARPS,
        "maxnreg": MOST_REGISTERS,
    }


def finish(
    lane: TritonChannel, sends: Sends, tag: int, receipt: Receipt, offsets: Tensor, indices: Tensor, batch: int
) -> Tensor:
    """Launch the end of a call whose sends are launched, and return its output."""
    finish_kernel[(1,)](
        lane.state,
        lane.record,
        lane.control,
        sends.slices,
        offsets,
        indices,
        batch,
        offsets.numel() - 1,
        receipt.slot.address,
        receipt.nbytes,
        lane.rank,
        lane.world,
        tag,
        lane.agreement.call_number,
        REJECTED_HERE=False,
        LANES=LANES,
        num_warps=NUM_WARPS,
    )
    lane.finished_calls += 1
    return receipt.deliver()


def abort(lane: TritonChannel) -> None:
    """This rank's whole part of a call that it rejects: its peers' waits end, and the epoch is used up."""
    nothing = lane.constants([1] * lane.world)
    finish_kernel[(1,)](
        lane.state,
        lane.record,
        lane.control,
        nothing,
        nothing,
        nothing,
        0,
        0,
        0,
        0,
        lane.rank,
        lane.world,
        0,
        lane.agreement.call_number,
        REJECTED_HERE=True,
        LANES=LANES,
        num_warps=NUM_WARPS,
    )
    lane.finished_calls += 1
