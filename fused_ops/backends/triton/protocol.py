"""One call's sending side, as the programs of a persistent kernel live it: claim tiles, find destinations, raise flags.

Tile 0 posts the credits. Slices follow, those for remote ranks first, the next rank first. Sends come before waits, and nothing
waits for a tile of this rank, so programs may run in any order, and one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.link import load_acquire, now_ns, pause, signal, timeout_ns, wait
from fused_ops.symmetric import agreement as host
from fused_ops.symmetric import device_slots
from fused_ops.symmetric import triton_layout as layout
from fused_ops.symmetric.triton_layout import State

EPOCH = tl.constexpr(int(State.EPOCH))
NEXT_TILE = tl.constexpr(int(State.NEXT_TILE))
FAILED = tl.constexpr(int(State.FAILED))
FAILED_PEER = tl.constexpr(int(State.FAILED_PEER))
PROBLEM = tl.constexpr(int(State.PROBLEM))
BROKEN = tl.constexpr(int(State.BROKEN))
TILES_DONE = tl.constexpr(int(State.TILES_DONE))
NO_PROBLEM = tl.constexpr(layout.NO_PROBLEM)

FLAG = tl.constexpr(layout.FLAG)
CREDIT_TAG = tl.constexpr(layout.CREDIT_TAG)
CREDIT_PLACE = tl.constexpr(layout.CREDIT_PLACE)
WORDS_A_HALF = tl.constexpr(layout.WORDS_A_HALF)
WORDS_A_PEER = tl.constexpr(layout.WORDS_A_PEER)
FIRST_ABORT_TAG = tl.constexpr(layout.FIRST_ABORT_TAG)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
ARENA_SHIFT = tl.constexpr(device_slots.ARENA_SHIFT)
OFFSET_MASK = tl.constexpr((1 << device_slots.ARENA_SHIFT) - 1)
PLACE_SHIFT = tl.constexpr(device_slots.PLACE_SHIFT)

# What every send kernel takes and no variant should be compiled for.
LINK_SCALARS = ("record", "own", "rank", "world", "tag", "place", "num_tiles", "delay_us")

TIMEOUT = tl.constexpr(host.TIMEOUT)
REJECTED = tl.constexpr(host.REJECTED)
BAD_TAG = tl.constexpr(host.BAD_TAG)


@triton.jit
def entries(control, owner, writer, epoch):
    """Words that `writer` (a rank or a tensor of ranks) stores for `owner` (likewise) in this epoch."""
    area = tl.load(control + owner).to(tl.pointer_type(tl.int64))
    return area + writer * WORDS_A_PEER + (epoch & 1) * WORDS_A_HALF


@triton.jit
def stopped(state):
    """Whether this call had failed before its first tile: a wrong index was found, or the channel is broken."""
    return (tl.load(state + PROBLEM) != NO_PROBLEM) | (tl.load(state + BROKEN) != 0)


@triton.jit
def claim(state, num_tiles):
    """The next tile for this program; `num_tiles` when none is left or the call has failed."""
    tile = num_tiles
    if tl.atomic_add(state + FAILED, 0, sem="relaxed", scope="gpu") == 0:
        tile = tl.atomic_add(state + NEXT_TILE, 1, sem="relaxed", scope="gpu").to(tl.int32)
    return tile


@triton.jit
def post_credits(control, epoch, rank, world, tag, place, LANES: tl.constexpr):
    """Tell every peer where its slice goes: the place, then the layout it is good for."""
    peer = tl.arange(0, LANES)
    peers = (peer < world) & (peer != rank)
    words = entries(control, tl.where(peers, peer, rank), rank, epoch)
    signal(words + CREDIT_PLACE, epoch, place + peer * 0, peers)
    signal(words + CREDIT_TAG, epoch, tag + peer * 0, peers)


@triton.jit
def destination(state, record, control, arenas, epoch, rank, peer, tag, LANES: tl.constexpr):
    """The address of `peer`'s slot, once it has said where; 0 when the call has failed."""
    lane = tl.arange(0, LANES)
    inbox = entries(control, rank, peer, epoch)
    words = wait(inbox + CREDIT_TAG + lane * 0, epoch, lane == 0, timeout_ns(record, LANES), LANES)
    arrived = tl.max(words >> 32, 0) == epoch
    said = tl.max(words & 0xFFFFFFFF, 0)
    place = tl.max(load_acquire(inbox + CREDIT_PLACE + lane * 0, lane == 0) & 0xFFFFFFFF, 0)
    address = tl.load(arenas + (place >> ARENA_SHIFT) * MAX_RANKS + peer)
    address += (place & OFFSET_MASK) << PLACE_SHIFT
    if (arrived == 0) | (said != tag):
        address = address * 0
        code = address + TIMEOUT
        if arrived:
            code = address + BAD_TAG
            if said >= FIRST_ABORT_TAG:
                code = address + REJECTED
        if tl.atomic_cas(state + FAILED, address, code, sem="relaxed", scope="gpu") == 0:
            tl.store(state + FAILED_PEER, peer)
    return address


@triton.jit
def receiver(
    state, record, control, arenas, first_tiles, own, epoch, rank, world, tag, tile, num_tiles, LANES: tl.constexpr
):  # fmt: skip
    """Of a tile after the first: (rank it is for, address of that rank's slot or 0 when the call has failed, its number in the
    slice). `own` is the address of this rank's slot."""
    lane = tl.arange(0, LANES)
    starts = tl.load(first_tiles + lane, mask=lane < world, other=num_tiles)
    turn = tl.sum((starts <= tile).to(tl.int32), 0) - 1
    peer = (rank + 1 + turn) % world
    address = own
    if peer != rank:
        address = destination(state, record, control, arenas, epoch, rank, peer, tag, LANES)
    return peer, address, tile - tl.load(first_tiles + turn)


@triton.jit
def stress_delay(limit_us, epoch, rank, peer, LANES: tl.constexpr):
    """Stress tests: up to that long between a slice's data and its flag."""
    if limit_us > 0:
        mixed = (epoch * 2654435761) ^ (peer * 40503 + rank * 9973)
        length = ((mixed ^ (mixed >> 15)) & 0xFFFFFF) % limit_us * 1000
        start = now_ns(LANES)
        while now_ns(LANES) - start < length:
            pause(LANES)


@triton.jit
def tile_sent(state, control, epoch, rank, peer, tag, num_tiles, delay_us, LANES: tl.constexpr):
    """This program has stored one of the `num_tiles` tiles of its slice for `peer`; the last one raises the peer's flag."""
    tl.debug_barrier()
    done = tl.atomic_add(state + TILES_DONE + peer, 1, sem="acq_rel", scope="gpu") + 1
    if (done == num_tiles) & (peer != rank):
        stress_delay(delay_us, epoch, rank, peer, LANES)
        lane = tl.arange(0, LANES)
        signal(entries(control, peer, rank, epoch) + FLAG + lane * 0, epoch, tag + lane * 0, lane == 0)
