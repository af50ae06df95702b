"""The protocol's part in the GEMM kernels, which send slices of one tile each and take in the peers' slices as they come.

A slot holds, beside the data, a word of {epoch, tag} for every slice that it receives. They are cleared before the credit that
names the slot is posted, so that what lay there before is no flag; a rank that reads them waits for its own credit first. The
peer's flag of the whole call stands for all of its slices, and says when the peer has given up.

All sends are claimed before anything that waits for a slice: where a program waits, every tile that a peer may wait for is sent,
or computed by a program that runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.finish import WAIT_NS
from fused_ops.backends.triton.link import INTERPRETED, load_acquire, now_ns, pause, signal, timeout_ns
from fused_ops.backends.triton.protocol import (
    ARENA_SHIFT,
    BAD_TAG,
    CREDIT_PLACE,
    CREDIT_TAG,
    FAILED,
    FAILED_PEER,
    FIRST_ABORT_TAG,
    FLAG,
    MAX_RANKS,
    NEXT_TILE,
    OFFSET_MASK,
    PLACE_SHIFT,
    REJECTED,
    TILES_DONE,
    TIMEOUT,
    entries,
    post_credits,
    stress_delay,
)
from fused_ops.symmetric.triton_layout import State

# {programs that have ended: 16 bits, nanoseconds that they waited: 48 bits}; zero between calls.
WAITED = tl.constexpr(int(State.WAITED))
PROGRAM_SHIFT = tl.constexpr(48)
NANOSECONDS = tl.constexpr((1 << 48) - 1)

_CLAIM = tl.constexpr(
    "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; mov.b64 $0, 0; @%p atom.relaxed.gpu.global.add.u64 $0, [$1], 1; }"
)
_PROXY_FENCE = tl.constexpr("fence.proxy.async.global; mov.b32 $0, $1;")


@triton.jit
def claim_ahead(state, LANES: tl.constexpr):
    """Ask for the next tile: `claimed` says which, and waits for the answer. In between there is work to do."""
    lane = tl.arange(0, LANES)
    words, mask = state + NEXT_TILE + lane * 0, lane == 0
    if INTERPRETED:
        return tl.where(mask, tl.atomic_add(words, 1 + lane.to(tl.int64) * 0, mask=mask, sem="relaxed", scope="gpu"), 0)
    else:
        return tl.inline_asm_elementwise(
            _CLAIM, "=&l,l,r", [words, mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def claimed(ahead, num_tiles):
    """The tile that was asked for; `num_tiles` when none is left."""
    return tl.minimum(tl.max(ahead, 0), num_tiles.to(tl.int64)).to(tl.int32)


@triton.jit
def open_slot(control, epoch, rank, world, tag, place, flags, num_flags, LANES: tl.constexpr):
    """Clear the slices' flags, then post the credits: the peers', and this rank's own."""
    at = tl.arange(0, LANES).to(tl.int64)
    lane = tl.arange(0, LANES)
    while tl.min(at, 0) < num_flags:
        tl.store(flags + at, tl.full([LANES], 0, tl.int64), mask=at < num_flags)
        at += LANES
    signal(entries(control, rank, rank, epoch) + CREDIT_TAG + lane * 0, epoch, tag + lane * 0, lane == 0)
    post_credits(control, epoch, rank, world, tag, place, LANES)


@triton.jit
def fail(state, code, peer):
    """The call has failed; the first to say so wins."""
    nothing = tl.full((), 0, tl.int64)
    if tl.atomic_cas(state + FAILED, nothing, nothing + code, sem="relaxed", scope="gpu") == 0:
        tl.store(state + FAILED_PEER, peer)


@triton.jit
def has_failed(state, LANES: tl.constexpr):
    return tl.max(tl.load(state + FAILED + tl.arange(0, LANES) * 0, volatile=True), 0) != 0


@triton.jit
def await_words(
    state, record, control, epoch, rank, tag, words, writers, wanted, ARE_SLICES: tl.constexpr, LANES: tl.constexpr
):
    """Poll words [LANES] until all that are `wanted` are {epoch, tag}. Returns (whether they are, nanoseconds waited).

    writers: the rank that each is of, whose flag of the call is heard as well: it may call the rest off, and stands for all
    slices (not for a credit). A failure is recorded.
    """
    lane = tl.arange(0, LANES)
    arrived_word = (epoch << 32) | tag
    missing = wanted & (load_acquire(words, wanted) != arrived_word)
    left = tl.sum(missing.to(tl.int32), 0)
    start = now_ns(LANES)
    waited = start - start
    limit = timeout_ns(record, LANES)
    good = tl.full((), 1, tl.int32)
    finals = entries(control, rank, writers, epoch) + FLAG
    while (left > 0) & (good != 0):
        pause(LANES)
        final = load_acquire(finals, missing)
        seen = load_acquire(words, missing)
        missing &= seen != arrived_word
        if ARE_SLICES:
            missing &= final != arrived_word
        left = tl.sum(missing.to(tl.int32), 0)
        waited = now_ns(LANES) - start
        other_word = tl.where((seen >> 32) == epoch, seen, tl.where(final == arrived_word, 0, final))
        ended = missing & ((other_word >> 32) == epoch)
        num_ended = tl.sum(ended.to(tl.int32), 0)
        if left > 0:
            if num_ended > 0:
                said = tl.max(tl.where(ended, other_word & 0xFFFFFFFF, 0), 0)
                code = tl.full((), BAD_TAG, tl.int64)
                if said >= FIRST_ABORT_TAG:
                    code = code * 0 + REJECTED
                fail(state, code, tl.min(tl.where(ended, writers, LANES), 0).to(tl.int64))
                good = good * 0
            elif waited >= limit:
                code = tl.full((), TIMEOUT, tl.int64)
                fail(state, code, tl.min(tl.where(missing, writers + lane * 0, LANES), 0).to(tl.int64))
                good = good * 0
            elif has_failed(state, LANES):
                good = good * 0
    tl.debug_barrier()
    return good, waited


@triton.jit
def destinations(state, record, control, arenas, own, epoch, rank, wanted, tag, LANES: tl.constexpr):
    """(addresses [LANES] of the slots of the ranks that are `wanted`, whether all have said where, nanoseconds waited).

    This rank's own address is `own`, good once its flags are cleared."""
    lane = tl.arange(0, LANES)
    writers = tl.where(wanted, lane, rank)
    inbox = entries(control, rank, writers, epoch)
    good, waited = await_words(
        state, record, control, epoch, rank, tag, inbox + CREDIT_TAG, writers, wanted, False, LANES
    )
    place = load_acquire(inbox + CREDIT_PLACE, wanted & (lane != rank)) & 0xFFFFFFFF
    address = tl.load(arenas + (place >> ARENA_SHIFT) * MAX_RANKS + writers, mask=wanted, other=0)
    address += (place & OFFSET_MASK) << PLACE_SHIFT
    return tl.where(lane == rank, own, address), good, waited


@triton.jit
def of_rank(values, rank, LANES: tl.constexpr):
    """One of values [LANES]."""
    return tl.sum(tl.where(tl.arange(0, LANES) == rank, values, 0), 0)


@triton.jit
def slice_sent(flag, epoch, rank, peer, tag, delay_us, LANES: tl.constexpr):
    """Raise the flag of the slice that this program has stored."""
    tl.debug_barrier()
    stress_delay(delay_us, epoch, rank, peer, LANES)
    lane = tl.arange(0, LANES)
    signal(flag.to(tl.pointer_type(tl.int64)) + lane * 0, epoch, tag + lane * 0, lane == 0)


@triton.jit
def count_sent(state, control, slices, epoch, rank, to, tag, delay_us, LANES: tl.constexpr):
    """This program has stored a tile for each peer of the mask `to`; the last one of a peer raises its flag of the call."""
    peer = tl.arange(0, LANES)
    expected = tl.load(slices + peer, mask=to, other=0)
    tl.debug_barrier()
    one = tl.full([LANES], 1, tl.int64)
    done = tl.atomic_add(state + TILES_DONE + peer, one, mask=to, sem="acq_rel", scope="gpu") + 1
    last = to & (done == expected)
    if tl.sum(last.to(tl.int32), 0) > 0:
        stress_delay(delay_us, epoch, rank, rank, LANES)
        signal(entries(control, tl.where(to, peer, rank), rank, epoch) + FLAG, epoch, tag + peer * 0, last)


@triton.jit
def see_stored_by_others(LANES: tl.constexpr):
    """What was seen by acquire is seen by descriptors too: TMA reads by another proxy."""
    tl.inline_asm_elementwise(_PROXY_FENCE, "=r,r", [tl.arange(0, LANES)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def leave(state, record, waited):
    """A program's end. The last one adds to the record what the programs waited, in the mean."""
    mine = (tl.full((), 1, tl.int64) << PROGRAM_SHIFT) + waited
    so_far = tl.atomic_add(state + WAITED, mine, sem="relaxed", scope="gpu")
    programs = tl.num_programs(0).to(tl.int64)
    if (so_far >> PROGRAM_SHIFT) == programs - 1:
        tl.store(record + WAIT_NS, tl.load(record + WAIT_NS) + ((so_far + mine) & NANOSECONDS) // programs)
        tl.store(state + WAITED, tl.full((), 0, tl.int64))
