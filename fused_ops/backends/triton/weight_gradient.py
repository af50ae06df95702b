"""The gradient of per-sample weights: the dot product of the bag's gradient and the row that was looked up."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.features import DIM, FIRST_ROW, TABLE, WORDS
from fused_ops.backends.triton.finish import SUPPRESSED
from fused_ops.backends.triton.link import aligned
from fused_ops.backends.triton.sorted_lookups import bag_gradients, bag_of, entries_at, one_over_length


@triton.jit(do_not_specialize=["num_lookups", "batch", "local_dim"])
def weight_gradient_kernel(
    state,
    out,  # [nnz] fp32
    order,
    features,
    offsets,
    bag_of_lookup,
    grad,
    num_lookups: tl.int64,
    batch: tl.int64,
    local_dim: tl.int64,
    BITS: tl.constexpr,
    MEAN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    first = tl.program_id(0).to(tl.int64) * ROWS
    suppressed = tl.load(state + SUPPRESSED) != 0
    while first < num_lookups:
        at = first + tl.arange(0, ROWS)
        live = at < num_lookups
        if suppressed:
            tl.store(out + at, tl.full([ROWS], float("nan"), tl.float32), mask=live)
        else:
            row, position = entries_at(order, at, live, BITS)
            bag = bag_of(position, bag_of_lookup, live, True)
            gradient = bag_gradients(grad, features, bag, live, batch, local_dim, column, ALIGN)
            feature = features + bag // batch * WORDS
            dim = aligned(tl.load(feature + DIM, mask=live, other=0), ALIGN)
            row -= tl.load(feature + FIRST_ROW, mask=live, other=0)
            table = tl.load(feature + TABLE, mask=live, other=0).to(tl.pointer_type(DTYPE))
            table = tl.multiple_of(table, TABLE_BYTES)
            mask = live[:, None] & (column[None, :] < dim[:, None])
            values = tl.load((table + row * dim)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
            dot = tl.sum(values * gradient, 1)
            if MEAN:
                dot *= one_over_length(bag, offsets, live)
            tl.store(out + position, dot, mask=live)
        first += tl.num_programs(0).to(tl.int64) * ROWS
