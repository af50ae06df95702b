"""Partial sums of tiles: stored whole into the slot of the rank that adds them up, and added there in rank order.

A slot holds the flags [tiles, world], then the tiles of each sender, one behind the other: CHUNKS pieces of columns, each
[BLOCK_M, BLOCK_N / CHUNKS] in fp32. Tiles are stored as wide as they are, so that every row of a piece is whole and aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fused_ops.backends.triton.gemm_link import of_rank
from fused_ops.backends.triton.gemm_tiles import CHUNKS, TileShape, chunks_of
from fused_ops.backends.triton.link import put_slice

FLAG_BYTES = 8
ALIGNMENT = 256


@dataclass(frozen=True)
class PartialSlot:
    """Where the parts of a slot begin, in bytes."""

    flags: int
    num_flags: int
    partials: int
    source_bytes: int
    end: int

    @classmethod
    def of(cls, shape: TileShape, tiles: int, sources: int, world: int, start: int = 0) -> PartialSlot:
        """For `tiles` tiles of each of `sources` ranks, behind `start` bytes of something else."""
        flags = aligned_up(start)
        partials = aligned_up(flags + tiles * world * FLAG_BYTES)
        source_bytes = tiles * shape.rows * shape.columns * 4
        return cls(flags, tiles * world, partials, source_bytes, partials + sources * source_bytes)

    def arguments(self) -> dict[str, int]:
        """What a kernel takes of it."""
        return {
            "flags": self.flags,
            "num_flags": self.num_flags,
            "partials": self.partials,
            "source_bytes": self.source_bytes,
        }


def aligned_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


@triton.jit
def offsets_in_chunk(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N / CHUNKS]."""
    width: tl.constexpr = BLOCK_N // CHUNKS
    return tl.arange(0, BLOCK_M)[:, None] * width + tl.arange(0, width)[None, :]


@triton.jit
def tile_pointer(base, number, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of tile `number` of the tiles of one sender at the address `base`."""
    address = base + number.to(tl.int64) * (BLOCK_M * BLOCK_N * 4)
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def store_partial(tile, to, live_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile's first `live_rows` rows at the pointer `to`."""
    size: tl.constexpr = BLOCK_M * BLOCK_N // CHUNKS
    at = offsets_in_chunk(BLOCK_M, BLOCK_N)
    mask = (tl.arange(0, BLOCK_M) < live_rows)[:, None] & (at >= 0)
    chunks = chunks_of(tile)
    for chunk in tl.static_range(CHUNKS):
        put_slice(to + chunk * size + at, chunks[chunk], mask)


@triton.jit
def sum_of(partials, source_bytes, first, end, total, mask, at):
    """`total` and the partial sums of the senders from `first` to `end`, one after another. `partials`: of the first sender."""
    for source in range(first, end):
        pointer = (partials + source * source_bytes).to(tl.pointer_type(tl.float32))
        total += tl.load(tl.multiple_of(pointer, 16) + at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def rounded(
    total, bias, row, end_row, first_column, columns,
    DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A chunk of sums of rows `row` with the bias, rounded; where it goes in [rows, columns]; what of it does."""
    column = first_column + tl.arange(0, WIDTH)
    is_column = column < columns // ALIGN * ALIGN
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * (columns // ALIGN * ALIGN) + column[None, :]
    return total.to(DTYPE), at, (row < end_row)[:, None] & is_column[None, :]


@triton.jit
def store_at(address, values, at, mask, DTYPE: tl.constexpr):
    put_slice(tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + at, values, mask)


@triton.jit
def store_everywhere(addresses, values, at, mask, world, rank, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Into every rank's output, at `addresses` [LANES]."""
    for turn in range(world):
        peer = (rank + 1 + turn) % world
        store_at(of_rank(addresses, peer, LANES), values, at, mask, DTYPE)
