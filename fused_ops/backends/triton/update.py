"""Gradients of rows: added up in fp32 in a fixed order, then handed once a distinct row to `update_row`.

The lookups, sorted by row, are cut into pieces: a new one at every row, and after every PIECE lookups of one row. Programs take
ROWS pieces at a time. A row of one piece is updated at once; the sums of a longer row's pieces go to scratch memory, and a
second kernel adds them up, in order, and updates the row. So a row that every sample looks up keeps no single program busy
for long, and no sum depends on how many programs there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.finish import SUPPRESSED
from fused_ops.backends.triton.row_update import update_row
from fused_ops.backends.triton.sorted_lookups import bag_gradients, bag_of, entries_at, one_over_length


@triton.jit
def scratch_row(begin, is_full, PIECE: tl.constexpr):
    """Where the sum of a longer row's piece goes. Full pieces begin at least PIECE apart, and so do those that are not full."""
    return begin // PIECE * 2 + (is_full == 0).to(tl.int64)


@triton.jit(do_not_specialize=["num_lookups", "batch", "local_dim"])
def update_kernel(
    state,
    order,  # [nnz] sorted lookups
    pieces,  # [nnz + 1] where each piece begins, then nnz
    num_pieces,  # [1]
    scratch,  # fp32 [2 * ceil(nnz / PIECE), BLOCK_D]
    long_rows,  # [ceil(nnz / PIECE)] first lookup of the longer row whose first piece begins there; -1: none
    features,
    targets,
    offsets,
    bag_of_lookup,
    weights,
    grad,  # [batch, local_dim]
    learning_rate,
    corrections,
    eps: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    num_lookups: tl.int64,
    batch: tl.int64,
    local_dim: tl.int64,
    BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    TARGET_BYTES: tl.constexpr,
    STATE_BYTES: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    count = tl.load(num_pieces)
    if tl.load(state + SUPPRESSED) != 0:
        count = count * 0
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < count:
        number = first + tl.arange(0, ROWS)
        exists = number < count
        begin = tl.load(pieces + number, mask=exists, other=0)
        end = tl.load(pieces + number + 1, mask=exists, other=0)
        row, payload = entries_at(order, begin, exists, BITS)
        before = tl.load(order + begin - 1, mask=exists & (begin > 0), other=-1) >> BITS
        after = tl.load(order + end, mask=exists & (end < num_lookups), other=-1) >> BITS
        is_first, is_last = before != row, after != row
        bag = bag_of(payload, bag_of_lookup, exists, WEIGHTED)

        total = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
        longest = tl.max(end - begin, 0)
        step = 0
        while step < longest:
            at = begin + step
            live = at < end
            its_payload = entries_at(order, at, live, BITS)[1]
            its_bag = bag_of(its_payload, bag_of_lookup, live, WEIGHTED)
            gradient = bag_gradients(grad, features, its_bag, live, batch, local_dim, column, ALIGN)
            if WEIGHTED:
                gradient *= tl.load(weights + its_payload, mask=live, other=0.0)[:, None]
            if MEAN:
                gradient *= one_over_length(its_bag, offsets, live)[:, None]
            total += gradient
            step += 1

        whole = exists & is_first & is_last
        update_row(
            targets, features, bag // batch, row, whole, total, column, learning_rate, corrections, eps, beta1, beta2,
            DTYPE, OPTIMIZER, ALIGN, TARGET_BYTES, STATE_BYTES,
        )  # fmt: skip
        part = exists & ((is_first & is_last) == 0)
        to = scratch + scratch_row(begin, end - begin == PIECE, PIECE)[:, None] * BLOCK_D + column[None, :]
        tl.store(to, total, mask=part[:, None] & (column >= 0)[None, :])
        tl.store(long_rows + begin // PIECE, begin, mask=part & is_first)
        first += tl.num_programs(0).to(tl.int64) * ROWS


@triton.jit(do_not_specialize=["num_lookups", "batch", "num_blocks"])
def update_long_rows_kernel(
    state,
    order,
    scratch,
    long_rows,
    features,
    targets,
    bag_of_lookup,
    learning_rate,
    corrections,
    eps: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    num_lookups: tl.int64,
    batch: tl.int64,
    num_blocks: tl.int64,  # of PIECE lookups
    BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    TARGET_BYTES: tl.constexpr,
    STATE_BYTES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The rows that `update_kernel` left in pieces, one a program at a time."""
    column = tl.arange(0, BLOCK_D)
    block = tl.program_id(0).to(tl.int64)
    if tl.load(state + SUPPRESSED) != 0:
        num_blocks = num_blocks * 0
    while block < num_blocks:
        begin = tl.load(long_rows + block)
        if begin >= 0:
            at = begin + tl.arange(0, 1)
            live = at >= 0
            rows, payload = entries_at(order, at, live, BITS)
            row = tl.load(order + begin) >> BITS
            total = tl.full([1, BLOCK_D], 0.0, tl.float32)
            piece = begin
            more = piece < num_lookups
            while more:
                last = piece + PIECE - 1
                is_full = (last < num_lookups) & ((tl.load(order + tl.minimum(last, num_lookups - 1)) >> BITS) == row)
                total += tl.load(scratch + scratch_row(piece, is_full, PIECE) * BLOCK_D + column)[None, :]
                piece += PIECE
                more = is_full & (piece < num_lookups)
                if more:
                    more = (tl.load(order + piece) >> BITS) == row
            bag = bag_of(payload, bag_of_lookup, live, WEIGHTED)
            update_row(
                targets, features, bag // batch, rows, live, total, column, learning_rate, corrections, eps, beta1, beta2,
                DTYPE, OPTIMIZER, ALIGN, TARGET_BYTES, STATE_BYTES,
            )  # fmt: skip
        block += tl.num_programs(0)
