"""The kernel of `gemm_all_reduce` for small outputs: everybody's partial sums go to everybody, and each rank adds them up."""

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
    open_slot,
)
from fused_ops.backends.triton.gemm_operands import product
from fused_ops.backends.triton.gemm_partials import (
    offsets_in_chunk,
    rounded,
    store_at,
    store_partial,
    sum_of,
    tile_pointer,
)
from fused_ops.backends.triton.gemm_sums import GEMM_SCALARS
from fused_ops.backends.triton.gemm_tiles import CHUNKS, place_of_tile
from fused_ops.backends.triton.link import signal
from fused_ops.backends.triton.protocol import EPOCH, MAX_RANKS, stopped, stress_delay


@triton.jit(do_not_specialize=GEMM_SCALARS)
def one_phase_kernel(
    state,
    record: tl.int64,
    control,
    arenas,
    slices,  # [world] tiles that are sent to each rank
    a,  # descriptor of [rows, inner]
    b,  # descriptor of [columns, inner]
    bias,  # [columns]
    own: tl.int64,  # address of this rank's output
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
    """Tiles: one that posts the credits, then all of the output that are computed and sent, then the same again, added up."""
    record = record.to(tl.pointer_type(tl.int64))
    epoch = tl.load(state + EPOCH) + 1
    lane = tl.arange(0, LANES)
    ranks = lane < world
    num_products = (num_tiles - 1) // 2
    if stopped(state):
        num_tiles = num_tiles * 0
    bases = arenas + arena * MAX_RANKS
    own_base = tl.load(bases + rank)
    own_flags = (own_base + flags).to(tl.pointer_type(tl.int64))
    everybodys_flags = tl.load(bases + lane, mask=ranks, other=0) + flags
    is_open = rank * 0
    good = rank * 0 + 1
    waited = epoch * 0
    tile = claimed(claim_ahead(state, LANES), num_tiles)
    while tile < num_tiles:
        ahead = claim_ahead(state, LANES)
        if tile == 0:
            open_slot(control, epoch, rank, world, tag, place, own_flags, num_flags, LANES)
        else:
            number = (tile - 1) % num_products
            first_row, first_column = place_of_tile(number, rows, columns, BLOCK_M, BLOCK_N)
            exists = (first_row < rows) & (first_column < columns)
            if tile <= num_products:
                sums = product(
                    a, b, first_row, first_column, tl.where(exists, inner, 0),
                    A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
                )  # fmt: skip
                if is_open == 0:
                    _, good, more = destinations(state, record, control, arenas, own, epoch, rank, ranks, tag, LANES)
                    waited += more
                    is_open += 1
                if good != 0:
                    if exists:
                        for turn in range(world):
                            base = tl.load(bases + (rank + 1 + turn) % world)
                            to = tile_pointer(base + partials + rank * source_bytes, number, BLOCK_M, BLOCK_N)
                            store_partial(sums, to, rows - first_row, BLOCK_M, BLOCK_N)
                        tl.debug_barrier()
                        stress_delay(delay_us, epoch, rank, rank, LANES)
                        words = everybodys_flags + (number * world + rank) * 8
                        signal(words.to(tl.pointer_type(tl.int64)), epoch, tag + lane * 0, ranks)
                    count_sent(state, control, slices, epoch, rank, ranks & (lane != rank), tag, delay_us, LANES)
            elif exists:
                if is_open == 0:
                    _, good, more = destinations(
                        state, record, control, arenas, own, epoch, rank, lane == rank, tag, LANES
                    )
                    waited += more
                    is_open += 1
                if good != 0:
                    good, more = await_words(
                        state, record, control, epoch, rank, tag, own_flags + number * world + lane,
                        tl.where(ranks, lane, rank), ranks, True, LANES,
                    )  # fmt: skip
                    waited += more
                if good != 0:
                    width: tl.constexpr = BLOCK_N // CHUNKS
                    row = first_row + tl.arange(0, BLOCK_M)
                    received = own_base + partials + number.to(tl.int64) * (BLOCK_M * BLOCK_N * 4)
                    for chunk in range(CHUNKS):
                        at = chunk * BLOCK_M * width + offsets_in_chunk(BLOCK_M, BLOCK_N)
                        mask = (row < rows)[:, None] & (at >= 0)
                        total = tl.full([BLOCK_M, width], 0.0, tl.float32)
                        total = sum_of(received, source_bytes, 0, world, total, mask, at)
                        values, to, inside = rounded(
                            total, bias, row, rows, first_column + chunk * width, columns,
                            DTYPE, HAS_BIAS, ALIGN, width,
                        )  # fmt: skip
                        store_at(own, values, to, inside, DTYPE)
            if good == 0:
                num_tiles = num_tiles * 0
        tile = claimed(ahead, num_tiles)
    leave(state, record, waited)
