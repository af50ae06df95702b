"""How a product of a few rows is spread over blocks and warps (native/cuda_gemv.cuh): each rank's own affair."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

BY_ROWS, BY_COLUMNS, ANY_STRIDES = 0, 1, 2  # `WeightLayout`
MOST_ROWS = 64
CHUNK_BYTES, INPUT_PAD = 64, 16
FEWEST_WARPS = 4
ITEM_BYTES = (4, 2, 2)  # by dtype's code


class TileShape(ctypes.Structure):
    """`TileShape` of native/cuda_gemv.cuh."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "rows",
            "group_rows",
            "row_groups",
            "input_groups",
            "k_groups",
            "rounds",
            "rounds_a_slab",
            "slabs",
            "sum_stride",
        )
    ]


@dataclass(frozen=True)
class Limits:
    """What a kernel can do: `fo_cuda_gemm_limits`."""

    warp_rows: int
    warp_inputs: int
    depth: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Shape:
    tile: TileShape
    tiles: int
    blocks: int
    threads: int
    shared_bytes: int


@functools.lru_cache(maxsize=1024)
def shape_of(
    lib: ctypes.CDLL, dtype: int, layout: int, inputs: int, columns: int, inner: int, most_blocks: int
) -> Shape:
    """For `inputs` rows of input (at most MOST_ROWS), a weight [columns, inner] and at most so many blocks.

    One tile a block where that is possible, so that all blocks end together: a tile is as many rows of the weight as that
    takes. What its warps do not need for the rows, they share k with.
    """
    found = (ctypes.c_int32 * 5)()
    lib.fo_cuda_gemm_limits(dtype, layout, inputs, found)
    limits = Limits(*found)
    step = 8 if layout == BY_COLUMNS else 1
    input_groups = _parts(inputs, limits.warp_inputs)
    most_groups = limits.threads // 32 // input_groups
    most_rows = min(most_groups * limits.warp_rows, (limits.shared_bytes // (4 * inputs) - 20) // 8 * 8)
    share = _round_up(_parts(columns, most_blocks), step)
    tile_rows = share if share <= most_rows else _round_up(_parts(share, _parts(share, most_rows)), step)
    row_groups = _parts(tile_rows, limits.warp_rows)
    group_rows = _round_up(_parts(tile_rows, row_groups), step)
    sum_stride = _round_up(tile_rows, 16) + 4  # lanes store to banks of their own
    chunks = _parts(inner * ITEM_BYTES[dtype], CHUNK_BYTES)
    k_groups = max(1, min(most_groups // row_groups, _parts(chunks, limits.depth)))
    while k_groups > 1 and not _fits(k_groups, limits, inputs, sum_stride):
        k_groups -= 1
    rounds = _parts(chunks, k_groups * limits.depth)
    round_bytes = k_groups * limits.depth * CHUNK_BYTES
    slabs, rounds_a_slab = min(rounds, 1), rounds
    if inputs * (rounds * round_bytes + INPUT_PAD) > limits.shared_bytes:
        rounds_a_slab = (limits.shared_bytes // (2 * inputs) - INPUT_PAD) // round_bytes
        slabs = _parts(rounds, rounds_a_slab)
    shared_bytes = max(
        min(slabs, 2) * inputs * (rounds_a_slab * round_bytes + INPUT_PAD), k_groups * inputs * sum_stride * 4
    )
    tiles = _parts(columns, tile_rows)
    tile = TileShape(
        tile_rows, group_rows, row_groups, input_groups, k_groups, rounds, rounds_a_slab, slabs, sum_stride
    )
    warps = max(FEWEST_WARPS, row_groups * input_groups * k_groups)
    return Shape(tile, tiles, min(tiles, most_blocks), 32 * warps, shared_bytes)


def _fits(k_groups: int, limits: Limits, inputs: int, sum_stride: int) -> bool:
    """Its partial sums, and two slabs of the input of one round."""
    round_bytes = k_groups * limits.depth * CHUNK_BYTES
    slabs = 2 * inputs * (round_bytes + INPUT_PAD)
    return max(slabs, k_groups * inputs * sum_stride * 4) <= limits.shared_bytes


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def _round_up(count: int, step: int) -> int:
    return _parts(count, step) * step
