"""Pooled lookups whose rows go straight into the outputs of the ranks that own the samples."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.features import COLUMN, DIM, ROWS, TABLE, WORDS
from fused_ops.backends.triton.link import aligned, put_slice
from fused_ops.backends.triton.protocol import EPOCH, LINK_SCALARS, claim, post_credits, receiver, stopped, tile_sent

ERROR, CLAMP, HASH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def valid_row(index, rows, POLICY: tl.constexpr):
    """The row that an index [n] stands for, in tables of `rows`; as it is where the check kernel has refused bad ones."""
    row = index.to(tl.int64)
    if POLICY == CLAMP:
        row = tl.minimum(tl.maximum(row, 0), rows - 1)
    if POLICY == HASH:
        row = row % rows
        row = tl.where(row < 0, row + rows, row)
    return row


@triton.jit
def table_rows(table, dim, row, column, live, DTYPE: tl.constexpr):
    """Columns [BLOCK_D] of rows [BAGS] in fp32, zero where the lookup or the column is none."""
    mask = live[:, None] & (column < dim)[None, :]
    return tl.load(table + row[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def factor(weights, at, live, WEIGHTED: tl.constexpr):
    if WEIGHTED:
        return tl.load(weights + at, mask=live, other=0.0)[:, None]
    else:
        return 1.0


@triton.jit
def pooled(
    table, dim, rows, indices, weights, begin, end, column,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, POLICY: tl.constexpr,
    BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Columns [BLOCK_D] of bags [BAGS], each the sum of its rows in the order of its lookups, in fp32."""
    total = tl.full([BAGS, BLOCK_D], 0.0, tl.float32)
    longest = tl.max(end - begin, 0)
    step = 0
    while step < longest:
        # Four rows of every bag are in flight before the first is added.
        at0 = begin + step
        at1, at2, at3 = at0 + 1, at0 + 2, at0 + 3
        live0, live1, live2, live3 = at0 < end, at1 < end, at2 < end, at3 < end
        index0 = tl.load(indices + at0, mask=live0, other=0)
        index1 = tl.load(indices + at1, mask=live1, other=0)
        index2 = tl.load(indices + at2, mask=live2, other=0)
        index3 = tl.load(indices + at3, mask=live3, other=0)
        row0 = table_rows(table, dim, valid_row(index0, rows, POLICY), column, live0, DTYPE)
        row1 = table_rows(table, dim, valid_row(index1, rows, POLICY), column, live1, DTYPE)
        row2 = table_rows(table, dim, valid_row(index2, rows, POLICY), column, live2, DTYPE)
        row3 = table_rows(table, dim, valid_row(index3, rows, POLICY), column, live3, DTYPE)
        total += row0 * factor(weights, at0, live0, WEIGHTED)
        total += row1 * factor(weights, at1, live1, WEIGHTED)
        total += row2 * factor(weights, at2, live2, WEIGHTED)
        total += row3 * factor(weights, at3, live3, WEIGHTED)
        step += 4
    if MEAN:
        length = tl.maximum(end - begin, 1).to(tl.float32)
        total *= tl.div_rn(tl.full([BAGS], 1.0, tl.float32), length)[:, None]
    return total


@triton.jit(do_not_specialize=[*LINK_SCALARS, "batch", "total_dim"])
def lookup_kernel(
    state,
    record: tl.int64,
    control,
    arenas,
    features,
    slices,  # [world] tiles of each destination's slice
    first_tiles,  # [world] in sending order: the next rank's first tile, ..., this rank's first tile
    samples,  # [world + 1] where each rank's samples start in the batch
    offsets,
    indices,
    weights,
    own: tl.int64,  # address of this rank's slot
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int64,
    place: tl.int64,
    num_tiles: tl.int32,
    delay_us: tl.int32,
    batch: tl.int64,
    total_dim: tl.int64,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    POLICY: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: a power of two that divides every width and column
    TABLE_BYTES: tl.constexpr,  # a power of two that divides the tables' addresses
    BAGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tiles: one that posts the credits, then one a feature and BAGS samples of a destination, by destination."""
    record = record.to(tl.pointer_type(tl.int64))
    epoch = tl.load(state + EPOCH) + 1
    if stopped(state):
        num_tiles = num_tiles * 0
    tile = claim(state, num_tiles)
    while tile < num_tiles:
        if tile == 0:
            post_credits(control, epoch, rank, world, tag, place, LANES)
        else:
            peer, address, at = receiver(
                state, record, control, arenas, first_tiles, own, epoch, rank, world, tag, tile, num_tiles, LANES
            )
            if address != 0:
                first_sample = tl.load(samples + peer)
                count = tl.load(samples + peer + 1) - first_sample
                blocks = tl.maximum((count + BAGS - 1) // BAGS, 1)
                feature = features + (at // blocks) * WORDS
                sample = (at % blocks) * BAGS + tl.arange(0, BAGS)
                dim = aligned(tl.load(feature + DIM), ALIGN)
                inside = (sample < count) & (dim > 0)
                bag = (at // blocks) * batch + first_sample + sample
                begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
                end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
                rows = tl.load(feature + ROWS)
                table = tl.multiple_of(tl.load(feature + TABLE).to(tl.pointer_type(DTYPE)), TABLE_BYTES)
                stride = aligned(total_dim, ALIGN)
                first_column = aligned(tl.load(feature + COLUMN), ALIGN)
                output = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
                chunk = 0
                while chunk * BLOCK_D < dim:
                    column = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
                    values = pooled(
                        table, dim, rows, indices, weights, begin, end, column,
                        DTYPE, WEIGHTED, MEAN, POLICY, BAGS, BLOCK_D,
                    )  # fmt: skip
                    to = output + sample[:, None] * stride + (first_column + column)[None, :]
                    put_slice(to, values, inside[:, None] & (column < dim)[None, :])
                    chunk += 1
                tile_sent(state, control, epoch, rank, peer, tag, tl.load(slices + peer), delay_us, LANES)
        tile = claim(state, num_tiles)
