"""The kernel of `gemm_reduce_scatter` and of two-phase `gemm_all_reduce`: partial sums go to whoever adds them up.

Of each owner's tiles the partial sums go straight into its slot, those of other owners first. The tiles that this rank owns stay
in registers: their program waits for the peers' partial sums, adds them up in rank order and stores the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.gemm_link import (
    await_words,
    claim_ahead,
    claimed,
    count_sent,
    destinations,
    leave,
    of_rank,
    open_slot,
    slice_sent,
)
from fused_ops.backends.triton.gemm_operands import product
from fused_ops.backends.triton.gemm_partials import (
    offsets_in_chunk,
    rounded,
    store_at,
    store_everywhere,
    store_partial,
    sum_of,
    tile_pointer,
)
from fused_ops.backends.triton.gemm_tiles import CHUNKS, chunks_of, part_of, place_of_tile
from fused_ops.backends.triton.protocol import EPOCH, LINK_SCALARS, MAX_RANKS, stopped

GEMM_SCALARS = (
    *LINK_SCALARS, "arena", "rows", "columns", "inner", "flags", "num_flags", "partials", "source_bytes",
)  # fmt: skip


@triton.jit
def place_of_owned_tile(
    owner, number, rows, columns, world, BY_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(first row, end of the owner's rows, first column, whether it exists) of the `number`th tile of an owner, who has a share
    of the rows, or (BY_TILES) of the tiles."""
    if BY_TILES:
        tiles = ((rows + BLOCK_M - 1) // BLOCK_M) * ((columns + BLOCK_N - 1) // BLOCK_N)
        first_tile, count = part_of(tiles, world, owner)
        row, column = place_of_tile(first_tile + number, rows, columns, BLOCK_M, BLOCK_N)
        return row, rows, column, number < count
    else:
        first_row, size = part_of(rows, world, owner)
        row, column = place_of_tile(number, size, columns, BLOCK_M, BLOCK_N)
        return first_row + row, first_row + size, column, (row < size) & (column < columns)


@triton.jit
def say_sent(state, control, slices, flag, epoch, rank, owner, tag, delay_us, LANES: tl.constexpr):
    """A tile for its owner is stored: raise its flag, and count it."""
    slice_sent(flag, epoch, rank, owner, tag, delay_us, LANES)
    count_sent(state, control, slices, epoch, rank, tl.arange(0, LANES) == owner, tag, delay_us, LANES)


@triton.jit
def sum_chunk(
    chunk, number, partials, source_bytes, own, outputs, bias, row, end_row, first_kept_row, first_column,
    columns, world, rank,
    DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, EVERYWHERE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A chunk of an own tile and the peers' partial sums of it, added in rank order, into the output at the address `own`, or
    (EVERYWHERE) those of all ranks, at `outputs` [LANES]. `first_kept_row`: the first of the output."""
    width: tl.constexpr = BLOCK_N // CHUNKS
    at = number * BLOCK_M * width + offsets_in_chunk(BLOCK_M, BLOCK_N)
    mask = (row < end_row)[:, None] & (at >= 0)
    total = sum_of(partials, source_bytes, 0, rank, tl.zeros_like(chunk), mask, at) + chunk
    total = sum_of(partials, source_bytes, rank, world - 1, total, mask, at)
    values, at, mask = rounded(
        total, bias, row - first_kept_row, end_row - first_kept_row, first_column + number * width, columns,
        DTYPE, HAS_BIAS, ALIGN, width,
    )  # fmt: skip
    if EVERYWHERE:
        store_everywhere(outputs, values, at, mask, world, rank, DTYPE, LANES)
    else:
        store_at(own, values, at, mask, DTYPE)


@triton.jit(do_not_specialize=GEMM_SCALARS)
def partial_sums_kernel(
    state,
    record: tl.int64,
    control,
    arenas,
    slices,  # [world] tiles that are sent to each rank
    first_tiles,  # [world] in sending order: the next rank's first tile, ..., this rank's first tile
    a,  # descriptor of [rows, inner]
    b,  # descriptor of [columns, inner]
    bias,  # [columns]
    own: tl.int64,  # address of this rank's output: its own rows, or all
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int64,
    place: tl.int64,
    num_tiles: tl.int32,
    delay_us: tl.int32,
    arena: tl.int32,  # whose first slot, on every rank, holds flags and partial sums
    rows: tl.int32,
    columns: tl.int32,
    inner: tl.int32,
    flags: tl.int64,  # where they begin in that slot, in bytes
    num_flags: tl.int64,
    partials: tl.int64,
    source_bytes: tl.int64,  # partial sums of one sender
    EVERYWHERE: tl.constexpr,  # sums go to all ranks, who own a share of the tiles each, not of the rows
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: a power of two that divides `columns`
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tiles: one that posts the credits, then those of each owner, this rank's own last."""
    record = record.to(tl.pointer_type(tl.int64))
    epoch = tl.load(state + EPOCH) + 1
    lane = tl.arange(0, LANES)
    if stopped(state):
        num_tiles = num_tiles * 0
    bases = arenas + arena * MAX_RANKS
    own_base = tl.load(bases + rank)
    first_kept_row = rows * 0
    if not EVERYWHERE:
        first_kept_row = part_of(rows, world, rank)[0]
    own_flags = (own_base + flags).to(tl.pointer_type(tl.int64))
    starts = tl.load(first_tiles + lane, mask=lane < world, other=1 << 40)
    seen_owner = rank * 0 - 1
    good = rank * 0 + 1
    outputs = lane.to(tl.int64) * 0
    first_own_tile = of_rank(starts, world - 1, LANES)
    unsaid_flag = epoch * 0  # of a tile that is stored; what is stored arrives while the next tile is computed
    waited = epoch * 0
    tile = claimed(claim_ahead(state, LANES), num_tiles)
    while tile < num_tiles:
        ahead = claim_ahead(state, LANES)
        if tile == 0:
            open_slot(control, epoch, rank, world, tag, place, own_flags, num_flags, LANES)
        else:
            turn = tl.sum((starts <= tile).to(tl.int32), 0) - 1
            owner = (rank + 1 + turn) % world
            number = (tile - of_rank(starts, turn, LANES)).to(tl.int32)
            first_row, end_row, first_column, exists = place_of_owned_tile(
                owner, number, rows, columns, world, EVERYWHERE, BLOCK_M, BLOCK_N
            )
            sums = product(
                a, b, first_row, first_column, tl.where(exists, inner, 0),
                A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            if unsaid_flag != 0:
                say_sent(state, control, slices, unsaid_flag, epoch, rank, seen_owner, tag, delay_us, LANES)
                unsaid_flag = epoch * 0
            if owner != seen_owner:
                wanted = lane == owner
                if EVERYWHERE:
                    wanted |= (owner == rank) & (lane < world)
                outputs, good, more = destinations(state, record, control, arenas, own, epoch, rank, wanted, tag, LANES)
                waited += more
                seen_owner = owner
            if (owner == rank) & exists & (good != 0):
                good, more = await_words(
                    state, record, control, epoch, rank, tag, own_flags + number * world + lane,
                    tl.where(lane < world, lane, rank), (lane < world) & (lane != rank), True, LANES,
                )  # fmt: skip
                waited += more
            if good == 0:
                num_tiles = num_tiles * 0
            elif owner != rank:
                if exists:
                    base = tl.load(bases + owner)
                    sender = rank - (rank > owner).to(tl.int32)
                    to = tile_pointer(base + partials + sender * source_bytes, number, BLOCK_M, BLOCK_N)
                    store_partial(sums, to, end_row - first_row, BLOCK_M, BLOCK_N)
                    unsaid_flag = base + flags + (number * world + rank) * 8
                else:
                    count_sent(state, control, slices, epoch, rank, lane == owner, tag, delay_us, LANES)
            elif exists:
                row = first_row + tl.arange(0, BLOCK_M)
                received = own_base + partials + number.to(tl.int64) * (BLOCK_M * BLOCK_N * 4)
                chunks = chunks_of(sums)
                for chunk in tl.static_range(CHUNKS):
                    sum_chunk(
                        chunks[chunk], chunk, received, source_bytes, own, outputs, bias, row, end_row, first_kept_row,
                        first_column, columns, world, rank, DTYPE, HAS_BIAS, ALIGN, EVERYWHERE, BLOCK_M, BLOCK_N, LANES,
                    )  # fmt: skip
                if EVERYWHERE:
                    peers = (lane < world) & (lane != rank)
                    count_sent(state, control, slices, epoch, rank, peers, tag, delay_us, LANES)
        tile = claimed(ahead, num_tiles)
        if (unsaid_flag != 0) & ((tile >= first_own_tile) | (tile >= num_tiles)):
            say_sent(state, control, slices, unsaid_flag, epoch, rank, seen_owner, tag, delay_us, LANES)
            unsaid_flag = epoch * 0
    leave(state, record, waited)
