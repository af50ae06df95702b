"""The output gradient's columns go straight to the ranks whose tables made them."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.link import aligned, put_slice
from fused_ops.backends.triton.protocol import EPOCH, LINK_SCALARS, claim, post_credits, receiver, stopped, tile_sent

RUN_WORDS = tl.constexpr(3)
RUN_COLUMN, RUN_WIDTH, RUN_PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=[*LINK_SCALARS, "first_sample", "num_samples", "total_dim"])
def exchange_gradient_kernel(
    state,
    record: tl.int64,
    control,
    arenas,
    slices,  # [world] tiles of each destination's slice
    first_tiles,  # [world] in sending order: the next rank's first tile, ..., this rank's first tile
    runs,  # [runs, 3] adjacent columns of one owner: first column, width, first column in the owner's packed rows
    run_begin,  # [world + 1] first run of each owner
    local_dims,  # [world] width of each owner's packed rows
    grad,  # [num_samples, total_dim]
    own: tl.int64,  # address of this rank's slot [batch, local_dim]
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int64,
    place: tl.int64,
    num_tiles: tl.int32,
    delay_us: tl.int32,
    first_sample: tl.int64,  # of this rank's samples in the batch
    num_samples: tl.int64,
    total_dim: tl.int64,
    divisor: tl.float32,
    DTYPE: tl.constexpr,
    DIVIDE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: a power of two that divides every width and column
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tiles: one that posts the credits, then one a run of columns and ROWS samples, by destination."""
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
                blocks = tl.maximum((num_samples + ROWS - 1) // ROWS, 1)
                number = tl.load(run_begin + peer) + at // blocks
                exists = number < tl.load(run_begin + peer + 1)
                run = runs + number * RUN_WORDS
                sample = (at % blocks) * ROWS + tl.arange(0, ROWS)
                inside = sample < num_samples
                width = tl.multiple_of(tl.load(run + RUN_WIDTH, mask=exists, other=0), ALIGN)
                column = tl.multiple_of(tl.load(run + RUN_COLUMN, mask=exists, other=0), ALIGN)
                packed = tl.multiple_of(tl.load(run + RUN_PACKED, mask=exists, other=0), ALIGN)
                to_stride = aligned(tl.load(local_dims + peer), ALIGN)
                from_stride = aligned(total_dim, ALIGN)
                output = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
                chunk = 0
                while chunk * BLOCK_D < width:
                    at_column = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
                    mask = inside[:, None] & (at_column < width)[None, :]
                    source = grad + sample[:, None] * from_stride + (column + at_column)[None, :]
                    values = tl.load(source, mask=mask, other=0.0)
                    if DIVIDE:
                        values = tl.div_rn(values.to(tl.float32), tl.full([ROWS, BLOCK_D], 1.0, tl.float32) * divisor)
                    to = output + (first_sample + sample)[:, None] * to_stride + (packed + at_column)[None, :]
                    put_slice(to, values, mask)
                    chunk += 1
                tile_sent(state, control, epoch, rank, peer, tag, tl.load(slices + peer), delay_us, LANES)
        tile = claim(state, num_tiles)
