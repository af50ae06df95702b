"""Offsets and indices are looked at before anything is sent: the first that is wrong stops the call on every rank."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.features import ROWS, WORDS
from fused_ops.backends.triton.protocol import PROBLEM
from fused_ops.symmetric import triton_layout as layout

FIRST_OFFSET = tl.constexpr(layout.FIRST_OFFSET)
LAST_OFFSET = tl.constexpr(layout.LAST_OFFSET)
DECREASING = tl.constexpr(layout.DECREASING)
OUT_OF_RANGE = tl.constexpr(layout.OUT_OF_RANGE)
SHIFT = tl.constexpr(layout.PROBLEM_SHIFT)
NOWHERE = tl.constexpr(1 << layout.PROBLEM_SHIFT)


@triton.jit
def report(state, kind, at):
    """`at` is the position of something wrong, or NOWHERE. The smallest report of a call wins."""
    if at < NOWHERE:
        tl.atomic_min(state + PROBLEM, at + (kind.to(tl.int64) << SHIFT), sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["num_indices", "batch", "num_bags"])
def check_kernel(
    state,
    features,
    offsets,
    indices,
    num_indices: tl.int64,
    batch: tl.int64,
    num_bags: tl.int64,
    ANY_INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (local features, at least 1; programs that share a feature's lookups)."""
    feature = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    first_bag = tl.minimum(feature * batch, num_bags)
    end_bag = tl.minimum(first_bag + batch, num_bags)

    wrong = tl.full([BLOCK], NOWHERE, tl.int64)
    at = first_bag + 1 + tl.program_id(1) * BLOCK + lane
    while tl.min(at, 0) <= end_bag:
        inside = at <= end_bag
        here, before = tl.load(offsets + at, mask=inside, other=0), tl.load(offsets + at - 1, mask=inside, other=0)
        wrong = tl.minimum(wrong, tl.where(inside & (here < before), at, NOWHERE))
        at += step
    report(state, tl.full((), DECREASING, tl.int32), tl.min(wrong, 0))
    if (feature == 0) & (tl.program_id(1) == 0):
        if tl.load(offsets) != 0:
            report(state, tl.full((), FIRST_OFFSET, tl.int32), num_bags * 0)
        if tl.load(offsets + num_bags).to(tl.int64) != num_indices:
            report(state, tl.full((), LAST_OFFSET, tl.int32), num_bags)

    # Offsets may be wrong: stay inside of the indices all the same.
    begin = tl.minimum(tl.maximum(tl.load(offsets + first_bag).to(tl.int64), 0), num_indices)
    end = tl.minimum(tl.load(offsets + end_bag).to(tl.int64), num_indices)
    rows = tl.load(features + feature * WORDS + ROWS)
    wrong = tl.full([BLOCK], NOWHERE, tl.int64)
    at = begin + tl.program_id(1) * BLOCK + lane
    while tl.min(at, 0) < end:
        inside = at < end
        if ANY_INDEX:  # clamp and hash make it valid, unless the table has no row
            bad = inside & (rows == 0)
        else:
            index = tl.load(indices + at, mask=inside, other=0).to(tl.int64)
            bad = inside & ((index < 0) | (index >= rows))
        wrong = tl.minimum(wrong, tl.where(bad, at, NOWHERE))
        at += step
    report(state, tl.full((), OUT_OF_RANGE, tl.int32), tl.min(wrong, 0))
