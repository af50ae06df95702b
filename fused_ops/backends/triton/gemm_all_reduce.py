"""GEMM + AllReduce in Triton, direct two-phase: each rank adds up some of the tiles and stores their sums everywhere.

Small outputs take one phase: everybody's partial sums go to everybody, and each rank adds them up.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.backends.triton.gemm_launch import (
    call_arguments,
    check_sizes,
    describe_nothing,
    factors,
    finish_gemm,
    output_arguments,
)
from fused_ops.backends.triton.gemm_one_phase import one_phase_kernel
from fused_ops.backends.triton.gemm_partials import PartialSlot
from fused_ops.backends.triton.gemm_sums import partial_sums_kernel
from fused_ops.backends.triton.gemm_tiles import TileShape, grid_of, tile_shape
from fused_ops.backends.triton.launch import Sends, open_channel
from fused_ops.gemm_all_reduce import OPERATOR
from fused_ops.gemm_inputs import GemmInputs, split_evenly, unflattened
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.triton_channel import TritonChannel

ONE_PHASE_BYTES = 512 << 10  # that a rank stores into its peers; a second phase costs about as much as these


@dataclass(frozen=True)
class Plan:
    """What follows from facts that all ranks share."""

    facts: tuple[str, ...]
    one_phase: bool
    shape: TileShape
    tiles: tuple[int, ...]  # that each rank adds up; one phase: that it computes
    slot: PartialSlot  # behind the place of the output, where two phases have one


@functools.lru_cache(maxsize=1024)
def plan(rows: int, columns: int, dtype: torch.dtype, has_bias: bool, world: int) -> Plan:
    facts = (OPERATOR, str(dtype), f"{rows} rows", f"{columns} columns", "with a bias" if has_bias else "no bias")
    shape = tile_shape(rows, columns, 1, dtype)
    tiles = shape.tiles(rows, columns)
    if 0 < (world - 1) * 4 * rows * columns <= ONE_PHASE_BYTES:
        return Plan(facts, True, shape, (tiles,) * world, PartialSlot.of(shape, tiles, world, world))
    owned = tuple(split_evenly(tiles, world))
    slot = PartialSlot.of(shape, owned[0], world - 1, world, start=dtype.itemsize * rows * columns)
    return Plan(facts, False, shape, owned, slot)


def gemm_all_reduce(input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int) -> Tensor:
    """See `fused_ops.gemm_all_reduce`."""
    lane = open_channel(group, channel, input.device)
    with lane.call(OPERATOR):
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias, leading=True)
        check_sizes(OPERATOR, gemm.rows, gemm.columns, gemm.input.shape[1])
        planned = plan(gemm.rows, gemm.columns, gemm.dtype, bias is not None, lane.world)
        tag, _ = lane.agreement.agree(planned.facts)
        lane.reserve(planned.slot.end)
        lane.describe(describe_nothing)
        run = _one_phase if planned.one_phase else _two_phases
        return unflattened(run(lane, tag, gemm, planned), input)


def _one_phase(lane: TritonChannel, tag: int, gemm: GemmInputs, planned: Plan) -> Tensor:
    products = max(1, planned.tiles[0])
    each = lane.constants([products] * lane.world)
    sends = Sends(slices=each, first_tiles=each, num_tiles=1 + 2 * products)
    receipt = lane.receive((0,), gemm.dtype)  # partial sums are done with when the call ends
    output = gemm.input.new_empty(gemm.rows, gemm.columns)
    one_phase_kernel[grid_of(lane, planned.shape, 1 + products)](
        **call_arguments(lane, sends, tag, receipt),
        **factors(gemm, planned.shape),
        **output_arguments(gemm, lane),
        **planned.slot.arguments(),
        **planned.shape.constants(gemm.dtype, lane.device),
        own=output.data_ptr(),
        arena=receipt.slot.arena.number,
        rows=gemm.rows,
        columns=gemm.columns,
    )
    finish_gemm(lane, sends, tag, output)
    return output


def _two_phases(lane: TritonChannel, tag: int, gemm: GemmInputs, planned: Plan) -> Tensor:
    sends = Sends.plan(lane, planned.tiles)
    sent = [max(1, tiles) + planned.tiles[lane.rank] for tiles in planned.tiles]  # partial sums of theirs, sums of ours
    sends = dataclasses.replace(sends, slices=lane.constants(sent))
    receipt = lane.receive((gemm.rows, gemm.columns), gemm.dtype)
    partial_sums_kernel[grid_of(lane, planned.shape, sends.num_tiles)](
        **call_arguments(lane, sends, tag, receipt),
        **factors(gemm, planned.shape),
        **output_arguments(gemm, lane),
        **planned.slot.arguments(),
        **planned.shape.constants(gemm.dtype, lane.device),
        first_tiles=sends.first_tiles,
        own=receipt.slot.address,
        arena=receipt.slot.arena.number,
        rows=gemm.rows,
        columns=gemm.columns,
        EVERYWHERE=True,
    )
    finish_gemm(lane, sends, tag, receipt)
    return receipt.deliver()
