"""Device functions that read lookups sorted by row: int64 words {row counted over all tables, payload}.

The payload, of BITS bits, is the lookup's position where it has a weight of its own, else the number of its bag.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.features import DIM, LOCAL_COLUMN, WORDS
from fused_ops.backends.triton.link import aligned


@triton.jit
def entries_at(order, at, live, BITS: tl.constexpr):
    """(row, payload) of sorted lookups [n]; row -1 where not `live`."""
    entry = tl.load(order + at, mask=live, other=-1)
    return entry >> BITS, entry & ((1 << BITS) - 1)


@triton.jit
def bag_of(payload, bag_of_lookup, live, WEIGHTED: tl.constexpr):
    bag = payload
    if WEIGHTED:
        bag = tl.load(bag_of_lookup + payload, mask=live, other=0)
    return bag


@triton.jit
def one_over_length(bag, offsets, live):
    """What mean pooling multiplies a bag by."""
    length = tl.load(offsets + bag + 1, mask=live, other=1) - tl.load(offsets + bag, mask=live, other=0)
    length = tl.maximum(length, 1).to(tl.float32)
    return tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length)


@triton.jit
def bag_gradients(grad, features, bag, live, batch, local_dim, column, ALIGN: tl.constexpr):
    """Columns [BLOCK_D] of the gradients of bags [n] in fp32, zero where there is none."""
    feature = features + bag // batch * WORDS
    dim = aligned(tl.load(feature + DIM, mask=live, other=0), ALIGN)
    first = aligned(tl.load(feature + LOCAL_COLUMN, mask=live, other=0), ALIGN)
    rows = grad + (bag % batch) * aligned(local_dim, ALIGN) + first
    mask = live[:, None] & (column[None, :] < dim[:, None])
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
