"""The kernel of `all_gather_gemm`: a few programs push this rank's rows to the peers while the others compute.

Rows arrive in bands, which several programs push together, a piece of the columns each. Tiles of own rows come first; then those
of each peer's, in the order in which peers send: a tile waits for the pieces of its own band only. Whoever is about to wait
pushes what is left to push first.
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
    see_stored_by_others,
    slice_sent,
)
from fused_ops.backends.triton.gemm_operands import product
from fused_ops.backends.triton.gemm_partials import rounded, store_at
from fused_ops.backends.triton.gemm_tiles import CHUNKS, chunks_of, part_of, place_of_tile
from fused_ops.backends.triton.link import aligned, put_slice
from fused_ops.backends.triton.protocol import EPOCH, LINK_SCALARS, TILES_DONE, stopped

BAND = tl.constexpr(128)  # rows
COPY_ROWS = tl.constexpr(32)
COPY_BYTES = tl.constexpr(1024)  # of a row, at a time

GATHER_SCALARS = (
    *LINK_SCALARS, "rows", "columns", "inner", "width", "flags", "num_flags", "output",
    "num_pieces", "pieces_across", "piece_steps", "bands", "pushers",
)  # fmt: skip


@triton.jit
def copy_piece(
    source, to, band, num_rows, first_step, steps, first_row, inner, width, DTYPE: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Of a band of source [num_rows, inner], `steps` times COPY_BYTES of every row from `first_step` on, into [.., width] at the
    address `to`, where the source begins in row `first_row`."""
    step: tl.constexpr = COPY_BYTES // (DTYPE.primitive_bitwidth // 8)
    inner, width = aligned(inner, ALIGN).to(tl.int64), aligned(width, ALIGN).to(tl.int64)
    target = tl.multiple_of(to.to(tl.pointer_type(DTYPE)), 16)
    rows = tl.minimum(num_rows - band * BAND, BAND)
    for block in range((rows + COPY_ROWS - 1) // COPY_ROWS):
        row = block * COPY_ROWS + tl.arange(0, COPY_ROWS)
        inside = row < rows
        row = (row + band * BAND).to(tl.int64)
        for part in range(steps):
            column = (first_step + part) * step + tl.arange(0, step)
            mask = inside[:, None] & (column < inner)[None, :]
            values = tl.load(source + row[:, None] * inner + column[None, :], mask=mask, other=0.0)
            put_slice(target + (first_row + row)[:, None] * width + column[None, :], values, mask)


@triton.jit
def claim_push(state, rank):
    """Nothing is counted as sent to this rank itself: its counter serves the claims of what is to be pushed."""
    return tl.atomic_add(state + TILES_DONE + rank, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def push(
    state, record, control, arenas, slices, source, own, epoch, rank, world, tag, place, delay_us,
    rows, inner, width, flags, num_flags, num_pieces, pieces_across, piece_steps, bands,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Post the credits, then push pieces of this rank's rows until none is left: `num_pieces` a destination, this rank's own slot
    last. Returns (whether all went well, nanoseconds waited)."""
    lane = tl.arange(0, LANES)
    first_row, num_rows = part_of(rows, world, rank)
    seen_peer = rank * 0 - 1
    good = rank * 0 + 1
    address = own
    waited = epoch * 0
    end = 1 + num_pieces * world
    claim = claim_push(state, rank)
    while claim < end:
        if claim == 0:
            own_flags = (own + flags).to(tl.pointer_type(tl.int64))
            open_slot(control, epoch, rank, world, tag, place, own_flags, num_flags, LANES)
        else:
            peer = (rank + 1 + (claim - 1) // num_pieces) % world
            number = (claim - 1) % num_pieces
            band, across = number // pieces_across, number % pieces_across
            if peer != seen_peer:
                addresses, good, more = destinations(
                    state, record, control, arenas, own, epoch, rank, lane == peer, tag, LANES
                )
                address = of_rank(addresses, peer, LANES)
                waited += more
                seen_peer = peer
            if good == 0:
                end = end * 0
            else:
                if band * BAND < num_rows:
                    copy_piece(
                        source, address, band, num_rows, across * piece_steps, piece_steps, first_row, inner, width,
                        DTYPE, ALIGN,
                    )  # fmt: skip
                    if peer != rank:
                        flag = address + flags + ((rank * bands + band) * pieces_across + across).to(tl.int64) * 8
                        slice_sent(flag, epoch, rank, peer, tag, delay_us, LANES)
                if peer != rank:
                    count_sent(state, control, slices, epoch, rank, lane == peer, tag, delay_us, LANES)
        claim = claim_push(state, rank)
    return good, waited


@triton.jit(do_not_specialize=GATHER_SCALARS)
def gather_gemm_kernel(
    state,
    record: tl.int64,
    control,
    arenas,
    slices,  # [world] pieces for each peer
    first_tiles,  # [world] in computing order: this rank's first tile, the previous rank's, ..., the next rank's
    source,  # [this rank's rows, inner], contiguous
    a,  # descriptor of the same
    gathered,  # descriptor of [rows, inner], this rank's slot
    b,  # descriptor of [columns, inner]
    bias,  # [columns]
    output: tl.int64,  # address of [rows, columns]
    own: tl.int64,  # address of this rank's slot
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int64,
    place: tl.int64,
    num_tiles: tl.int32,
    delay_us: tl.int32,
    rows: tl.int32,  # of all ranks
    columns: tl.int32,
    inner: tl.int32,
    width: tl.int32,  # from row to row in the slots, elements
    flags: tl.int64,  # where they begin in a slot, in bytes: [world, bands, pieces_across]
    num_flags: tl.int64,
    num_pieces: tl.int32,  # of this rank's rows
    pieces_across: tl.int32,  # of a band; no more than LANES
    piece_steps: tl.int32,  # of COPY_BYTES that a piece is wide
    bands: tl.int32,  # the most that a rank's rows make
    pushers: tl.int32,  # programs that push before anything else
    B_TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: a power of two that divides `columns`
    INNER_ALIGN: tl.constexpr,  # and one that divides `inner`
    HAS_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tiles: [BLOCK_M, BLOCK_N] of the output, by the rank that the rows come from."""
    record = record.to(tl.pointer_type(tl.int64))
    epoch = tl.load(state + EPOCH) + 1
    lane = tl.arange(0, LANES)
    own_flags = (own + flags).to(tl.pointer_type(tl.int64))
    starts = tl.load(first_tiles + lane, mask=lane < world, other=1 << 40)
    good = rank * 0 + 1
    waited = epoch * 0
    has_pushed = rank * 0
    if stopped(state):
        num_tiles = num_tiles * 0
        has_pushed += 1
    if (has_pushed == 0) & (tl.program_id(0) < pushers):
        good, waited = push(
            state, record, control, arenas, slices, source, own, epoch, rank, world, tag, place, delay_us,
            rows, inner, width, flags, num_flags, num_pieces, pieces_across, piece_steps, bands, DTYPE, INNER_ALIGN, LANES,
        )  # fmt: skip
        has_pushed += 1
    is_open = rank * 0
    if good == 0:
        num_tiles = num_tiles * 0
    tile = claimed(claim_ahead(state, LANES), num_tiles)
    while tile < num_tiles:
        turn = tl.sum((starts <= tile).to(tl.int32), 0) - 1
        writer = (rank - turn + world) % world
        number = (tile - of_rank(starts, turn, LANES)).to(tl.int32)
        part_row, part_rows = part_of(rows, world, writer)
        row, first_column = place_of_tile(number, part_rows, columns, BLOCK_M, BLOCK_N)
        if writer != rank:
            if has_pushed == 0:
                good, more = push(
                    state, record, control, arenas, slices, source, own, epoch, rank, world, tag, place, delay_us,
                    rows, inner, width, flags, num_flags, num_pieces, pieces_across, piece_steps, bands,
                    DTYPE, INNER_ALIGN, LANES,
                )  # fmt: skip
                waited += more
                has_pushed += 1
            if (is_open == 0) & (good != 0):
                _, good, more = destinations(state, record, control, arenas, own, epoch, rank, lane == rank, tag, LANES)
                waited += more
                is_open += 1
            if good != 0:
                words = own_flags + (writer * bands + row // BAND).to(tl.int64) * pieces_across + lane
                good, more = await_words(
                    state,
                    record,
                    control,
                    epoch,
                    rank,
                    tag,
                    words,
                    writer + lane * 0,
                    lane < pieces_across,
                    True,
                    LANES,
                )
                waited += more
            if HAS_TMA:
                see_stored_by_others(LANES)
        ahead = claim_ahead(state, LANES)
        if good == 0:
            num_tiles = num_tiles * 0
        else:
            rows_from, first = a, row
            if writer != rank:
                rows_from, first = gathered, part_row + row
            sums = product(
                rows_from, b, first, first_column, inner,
                False, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            its_row = part_row + row + tl.arange(0, BLOCK_M)
            end_row = part_row + part_rows
            width_of_chunk: tl.constexpr = BLOCK_N // CHUNKS
            chunks = chunks_of(sums)
            for chunk in tl.static_range(CHUNKS):
                values, at, mask = rounded(
                    chunks[chunk], bias, its_row, end_row, first_column + chunk * width_of_chunk, columns,
                    DTYPE, HAS_BIAS, ALIGN, width_of_chunk,
                )  # fmt: skip
                store_at(output, values, at, mask, DTYPE)
        tile = claimed(ahead, num_tiles)
    leave(state, record, waited)
