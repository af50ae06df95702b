"""Tiles of the GEMM kernels: their size, their order, and the pieces of columns in which a tile's sums are stored."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.triton_channel import TritonChannel

GROUP = tl.constexpr(8)  # rows of tiles whose columns are computed together, so that operands come from the L2 cache
CHUNKS = tl.constexpr(4)  # pieces of a tile that are stored one by one, so that few registers hold them
H200_SHARED_BYTES = 227 << 10
H200_SMS = 132
ONE_SM_SPARED_IN = (
    33  # by a kernel that waits first: the collective library's must get in beside it; 128 of 132 are filled
)


@dataclass(frozen=True)
class TileShape:
    rows: int
    columns: int
    num_warps: int
    programs_an_sm: int
    num_stages: int
    efficiency: float  # about what share of the largest tiles' rate an SM has with these

    def tiles(self, rows: int, columns: int) -> int:
        """Of a block of the output of that size."""
        return triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)

    def time(self, tiles: int, sms: int) -> float:
        """That many tiles take, in units of no meaning."""
        together = min(self.programs_an_sm, max(1, triton.cdiv(tiles, sms)))
        rounds = triton.cdiv(tiles, sms * together)
        return rounds * together * self.rows * self.columns / self.efficiency

    def inner(self, dtype: torch.dtype) -> int:
        """Of the inner dimension, at a time: 128 bytes, a row of shared memory as TMA swizzles it."""
        return 128 // dtype.itemsize

    def constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """What a kernel is compiled for."""
        stage = (self.rows + self.columns) * self.inner(dtype) * dtype.itemsize
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.inner(dtype),
            "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
            "LANES": 32 * self.num_warps,
            "num_warps": self.num_warps,
            "num_stages": max(1, min(self.num_stages, _shared_bytes(device) // stage)),
        }


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """That a program may have."""
    if device.type == "cpu":
        return H200_SHARED_BYTES
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


LARGE = TileShape(128, 256, num_warps=8, programs_an_sm=1, num_stages=4, efficiency=1.0)
MEDIUM = TileShape(128, 128, num_warps=4, programs_an_sm=2, num_stages=3, efficiency=0.9)
MEDIUM_FLOAT = TileShape(128, 128, num_warps=8, programs_an_sm=1, num_stages=3, efficiency=1.0)
FLAT = TileShape(64, 128, num_warps=4, programs_an_sm=2, num_stages=3, efficiency=0.75)
SMALL = TileShape(64, 64, num_warps=4, programs_an_sm=2, num_stages=4, efficiency=0.5)


@functools.lru_cache(maxsize=1024)
def tile_shape(rows: int, columns: int, parts: int, dtype: torch.dtype, sms: int = H200_SMS) -> TileShape:
    """The tiles in which `parts` blocks of [rows, columns] of an output are computed on so many SMs in the least time.

    Where tiles lie in a peer's memory as they are, `sms` must be the same on all ranks, whatever each one has.
    """
    shapes = (MEDIUM_FLOAT, FLAT, SMALL) if dtype == torch.float32 else (LARGE, MEDIUM, FLAT, SMALL)
    return min(shapes, key=lambda shape: shape.time(parts * shape.tiles(rows, columns), sms))


def sms_of(lane: TritonChannel, waits_first: bool) -> int:
    """That a kernel fills, some left free by one that waits first."""
    return max(1, lane.sms - (triton.cdiv(lane.sms, ONE_SM_SPARED_IN) if waits_first else 0))


def grid_of(lane: TritonChannel, shape: TileShape, tiles: int, waits_first: bool = False) -> tuple[int]:
    """Programs for a kernel that shares out `tiles`: no more than are resident together."""
    each = shape.programs_an_sm
    return (min(tiles, each * num_blocks(triton.cdiv(tiles, each), sms_of(lane, waits_first))),)


@triton.jit
def part_of(total, world, rank):
    """(first, size) of a rank's part of `total`, split as `split_evenly` does."""
    size, more = total // world, total % world
    return rank * size + tl.minimum(rank, more), size + (rank < more).to(total.dtype)


@triton.jit
def place_of_tile(number, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first row, first column) of tile `number` of a block [rows, columns]: GROUP tiles down, then the next column."""
    tiles_down = (rows + BLOCK_M - 1) // BLOCK_M
    tiles_across = (columns + BLOCK_N - 1) // BLOCK_N
    of_group = tl.maximum(tiles_across * GROUP, 1)
    first_down = number // of_group * GROUP
    height = tl.maximum(tl.minimum(tiles_down - first_down, GROUP), 1)
    in_group = number % of_group
    return (first_down + in_group % height) * BLOCK_M, in_group // height * BLOCK_N


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def chunks_of(tile):
    """The CHUNKS pieces of a tile's columns."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth
