"""GEMM + ReduceScatter in Triton: tiles of partial sums go straight into the rank that keeps their rows, others' rows first."""

from __future__ import annotations

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
from fused_ops.backends.triton.gemm_partials import PartialSlot
from fused_ops.backends.triton.gemm_sums import partial_sums_kernel
from fused_ops.backends.triton.gemm_tiles import TileShape, grid_of, tile_shape
from fused_ops.backends.triton.launch import Sends, open_channel
from fused_ops.gemm_inputs import GemmInputs, split_evenly
from fused_ops.gemm_reduce_scatter import OPERATOR
from fused_ops.symmetric.group import GroupContext


@dataclass(frozen=True)
class Plan:
    """What follows from facts that all ranks share."""

    facts: tuple[str, ...]
    shape: TileShape
    rows: tuple[int, ...]  # that each rank keeps
    tiles: tuple[int, ...]  # of each rank's rows
    slot: PartialSlot


@functools.lru_cache(maxsize=1024)
def plan(rows: int, columns: int, dtype: torch.dtype, has_bias: bool, world: int) -> Plan:
    facts = (OPERATOR, str(dtype), f"{rows} rows", f"{columns} columns", "with a bias" if has_bias else "no bias")
    parts = split_evenly(rows, world)
    shape = tile_shape(parts[0], columns, world, dtype)
    tiles = tuple(shape.tiles(part, columns) for part in parts)
    return Plan(facts, shape, tuple(parts), tiles, PartialSlot.of(shape, tiles[0], world - 1, world))


def gemm_reduce_scatter(
    input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.gemm_reduce_scatter`."""
    lane = open_channel(group, channel, input.device)
    with lane.call(OPERATOR):
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
        check_sizes(OPERATOR, gemm.rows, gemm.columns, gemm.input.shape[1])
        planned = plan(gemm.rows, gemm.columns, gemm.dtype, bias is not None, lane.world)
        tag, _ = lane.agreement.agree(planned.facts)
        lane.reserve(planned.slot.end)
        lane.describe(describe_nothing)

        sends = Sends.plan(lane, planned.tiles)
        receipt = lane.receive((0,), gemm.dtype)  # partial sums are done with when the call ends
        output = gemm.input.new_empty(planned.rows[lane.rank], gemm.columns)
        partial_sums_kernel[grid_of(lane, planned.shape, sends.num_tiles)](
            **call_arguments(lane, sends, tag, receipt),
            **factors(gemm, planned.shape),
            **output_arguments(gemm, lane),
            **planned.slot.arguments(),
            **planned.shape.constants(gemm.dtype, lane.device),
            first_tiles=sends.first_tiles,
            own=output.data_ptr(),
            arena=receipt.slot.arena.number,
            rows=gemm.rows,
            columns=gemm.columns,
            EVERYWHERE=False,
        )
        finish_gemm(lane, sends, tag, output)
        return output
