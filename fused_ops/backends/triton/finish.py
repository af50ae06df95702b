"""The last kernel of every call, one program: hear from every peer, settle how the call ended, open the next epoch.

It is also the whole part of a rank that rejected its input: its peers' waits end with a tag that says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.link import load_acquire, now_ns, signal, store_release, timeout_ns, wait
from fused_ops.backends.triton.protocol import (
    BAD_TAG,
    BROKEN,
    CREDIT_TAG,
    EPOCH,
    FAILED,
    FAILED_PEER,
    FIRST_ABORT_TAG,
    FLAG,
    NEXT_TILE,
    NO_PROBLEM,
    PROBLEM,
    REJECTED,
    TILES_DONE,
    TIMEOUT,
    entries,
)
from fused_ops.symmetric import agreement as host
from fused_ops.symmetric import triton_layout as layout
from fused_ops.symmetric.triton_layout import Record, State

SUPPRESSED = tl.constexpr(int(State.SUPPRESSED))
REJECTED_TAG = tl.constexpr(layout.REJECTED_TAG)
BAD_VALUE_TAG = tl.constexpr(layout.BAD_VALUE_TAG)
PASSED_ON_TAG = tl.constexpr(layout.PASSED_ON_TAG)
PROBLEM_SHIFT = tl.constexpr(layout.PROBLEM_SHIFT)
POSITION_MASK = tl.constexpr((1 << layout.PROBLEM_SHIFT) - 1)
OUT_OF_RANGE = tl.constexpr(layout.OUT_OF_RANGE)
CODE_BROKEN = tl.constexpr(host.BROKEN)
CODE_BAD_VALUE = tl.constexpr(layout.BAD_VALUE)
PHASE_CREDIT, PHASE_DATA = tl.constexpr(2), tl.constexpr(3)

WAIT_NS = tl.constexpr(int(Record.WAIT_NS))
SERIAL = tl.constexpr(int(Record.SERIAL))
CODE = tl.constexpr(int(Record.CODE))
PHASE = tl.constexpr(int(Record.PHASE))
PEER = tl.constexpr(int(Record.PEER))
LATE = tl.constexpr(int(Record.LATE))
RECORD_REJECTED = tl.constexpr(int(Record.REJECTED))
RECORD_BAD_VALUE = tl.constexpr(int(Record.BAD_VALUE))
RECORD_EPOCH = tl.constexpr(int(Record.EPOCH))
CALL = tl.constexpr(int(Record.CALL))
PROBLEM_KIND = tl.constexpr(int(Record.PROBLEM_KIND))
PROBLEM_AT = tl.constexpr(int(Record.PROBLEM_AT))
PROBLEM_VALUE = tl.constexpr(int(Record.PROBLEM_VALUE))
PROBLEM_FEATURE = tl.constexpr(int(Record.PROBLEM_FEATURE))


@triton.jit
def ranks_of(mask, LANES: tl.constexpr):
    """The lanes of `mask` as bits of one word."""
    return tl.sum(tl.where(mask, tl.full([LANES], 1, tl.int64) << tl.arange(0, LANES), 0), 0)


@triton.jit
def abort(state, control, epoch, rank, peers, slices, abort_tag, LANES: tl.constexpr):
    """End the waits of every peer that this rank has not sent its whole slice to."""
    peer = tl.arange(0, LANES)
    done = tl.load(state + TILES_DONE + peer, mask=peers, other=0)
    unsent = peers & (done < tl.load(slices + peer, mask=peers, other=1))
    words = entries(control, tl.where(peers, peer, rank), rank, epoch)
    # Credits that were posted stay good: a peer that stores on one of them stores before its flag of this epoch.
    posted = peers & ((load_acquire(words + CREDIT_TAG, peers) >> 32) == epoch)
    signal(words + CREDIT_TAG, epoch, abort_tag + peer * 0, peers & (posted == 0))
    signal(words + FLAG, epoch, abort_tag + peer * 0, unsent)


@triton.jit
def poison(output, num_bytes, BLOCK: tl.constexpr):
    """Fill with 0xFF, which is NaN in every dtype."""
    words = output.to(tl.int64).to(tl.pointer_type(tl.int8))
    at = tl.arange(0, BLOCK).to(tl.int64)
    while tl.min(at, 0) < num_bytes:
        tl.store(words + at, tl.full([BLOCK], -1, tl.int8), mask=at < num_bytes)
        at += BLOCK


@triton.jit
def describe(record, problem, offsets, indices, batch, num_bags):
    """Record which value the check kernel found to be wrong, and where."""
    kind = problem >> PROBLEM_SHIFT
    at = problem & POSITION_MASK
    tl.store(record + PROBLEM_KIND, kind)
    tl.store(record + PROBLEM_AT, at)
    if kind == OUT_OF_RANGE:
        tl.store(record + PROBLEM_VALUE, tl.load(indices + at).to(tl.int64))
        feature = batch * 0
        while ((feature + 1) * batch < num_bags) & (
            tl.load(offsets + tl.minimum((feature + 1) * batch, num_bags)) <= at
        ):
            feature += 1
        tl.store(record + PROBLEM_FEATURE, feature)
    else:
        tl.store(record + PROBLEM_VALUE, tl.load(offsets + at).to(tl.int64))
        tl.store(record + PROBLEM_FEATURE, (at - 1) // tl.maximum(batch, 1))


@triton.jit(
    do_not_specialize=["record", "batch", "num_bags", "output", "output_bytes", "rank", "world", "tag", "call_number"]
)
def finish_kernel(
    state,
    record: tl.int64,
    control,
    slices,  # [world] tiles of each destination's slice
    offsets,  # of the lookups that the check kernel looked at
    indices,
    batch: tl.int64,
    num_bags: tl.int64,
    output: tl.int64,  # address of what this call receives
    output_bytes: tl.int64,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int64,
    call_number: tl.int64,
    REJECTED_HERE: tl.constexpr,
    LANES: tl.constexpr,
):
    record = record.to(tl.pointer_type(tl.int64))
    epoch = tl.load(state + EPOCH) + 1
    peer = tl.arange(0, LANES)
    peers = (peer < world) & (peer != rank)
    problem = tl.load(state + PROBLEM)
    code = tl.load(state + FAILED)
    culprit = tl.load(state + FAILED_PEER)
    broken = tl.load(state + BROKEN)
    phase = tl.full((), PHASE_CREDIT, tl.int64)
    abort_tag = tl.full((), PASSED_ON_TAG, tl.int64)
    if broken != 0:
        code = code * 0 + CODE_BROKEN
    if problem != NO_PROBLEM:
        code = code * 0 + CODE_BAD_VALUE
        abort_tag = abort_tag * 0 + BAD_VALUE_TAG
    if REJECTED_HERE:
        code = code * 0 + REJECTED
        abort_tag = abort_tag * 0 + REJECTED_TAG
    if code != 0:
        abort(state, control, epoch, rank, peers, slices, abort_tag, LANES)

    # Every peer ends the epoch with a flag of one kind or the other. After it, it stores here no more.
    inbox = entries(control, rank, tl.where(peers, peer, rank), epoch)
    limit = timeout_ns(record, LANES)
    if (broken != 0) | (code == TIMEOUT):
        limit = limit * 0
    start = now_ns(LANES)
    flags = wait(inbox + FLAG, epoch, peers, limit, LANES)
    waited = now_ns(LANES) - start
    arrived = peers & ((flags >> 32) == epoch)
    said = flags & 0xFFFFFFFF
    failed = arrived & (said != tag)
    late = peers & (arrived == 0)
    num_late = tl.sum(late.to(tl.int32), 0)
    if (code == 0) & (tl.sum(failed.to(tl.int32), 0) > 0):
        code = code * 0 + BAD_TAG
        culprit = tl.min(tl.where(failed, peer, LANES), 0).to(tl.int64)
        phase = phase * 0 + PHASE_DATA
        if tl.sum((failed & (said >= FIRST_ABORT_TAG)).to(tl.int32), 0) > 0:
            code = code * 0 + REJECTED
    if num_late > 0:
        # A rank that came to this call has posted its credit, and may itself wait for the one that did not.
        absent = late & ((load_acquire(inbox + CREDIT_TAG, peers) >> 32) != epoch)
        if tl.sum(absent.to(tl.int32), 0) > 0:
            late = absent
        if REJECTED_HERE:
            code = code * 0 + TIMEOUT
        if code == 0:
            code = code * 0 + TIMEOUT
            phase = phase * 0 + PHASE_DATA
        tl.store(state + BROKEN, 1)

    if code != 0:
        poison(output, output_bytes, 4096)
        # What the host rejected it has raised already.
        if (num_late > 0) | (REJECTED_HERE == 0):
            tl.store(state + SUPPRESSED, 1)
            if tl.max(tl.load(record + SERIAL + peer * 0, volatile=True), 0) == 0:
                tl.store(record + CODE, code)
                tl.store(record + PHASE, phase)
                tl.store(record + PEER, culprit)
                tl.store(record + LATE, ranks_of(late, LANES))
                tl.store(record + RECORD_REJECTED, ranks_of(arrived & (said == REJECTED_TAG), LANES))
                tl.store(record + RECORD_BAD_VALUE, ranks_of(arrived & (said == BAD_VALUE_TAG), LANES))
                tl.store(record + RECORD_EPOCH, epoch)
                tl.store(record + CALL, call_number)
                if problem != NO_PROBLEM:
                    describe(record, problem, offsets, indices, batch, num_bags)
                tl.debug_barrier()
                store_release(record + SERIAL + peer * 0, epoch + peer * 0, peer == 0)

    tl.store(record + WAIT_NS, tl.load(record + WAIT_NS) + waited)
    tl.debug_barrier()
    tl.store(state + TILES_DONE + peer, peer * 0, mask=peer < world)
    tl.store(state + NEXT_TILE, 0)
    tl.store(state + FAILED, 0)
    tl.store(state + PROBLEM, NO_PROBLEM)
    tl.store(state + EPOCH, epoch)
