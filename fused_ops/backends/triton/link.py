"""The link, as Triton kernels see it: flags of system scope, a clock, and put_slice / signal / wait on top of them.

A kernel of L threads handles flags in tensors of L lanes, one a thread: a scalar would be loaded by every thread, each might
see another value, and warps would part ways in front of a barrier. For the same reason every decision comes out of a reduction.

Compiled, the flags are PTX (`ld.acquire.sys`, `st.release.sys`): no read-modify-write crosses the link, and pinned host
memory need not support atomics. Interpreted, on a CPU host, they are atomics on shared memory.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from fused_ops.symmetric.triton_layout import Record

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
TIMEOUT_NS = tl.constexpr(int(Record.TIMEOUT_NS))

_LOAD_ACQUIRE = tl.constexpr(
    "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; mov.b64 $0, 0; @%p ld.acquire.sys.global.b64 $0, [$1]; }"
)
_STORE_RELEASE = tl.constexpr(
    "{ .reg .pred %p; setp.ne.s32 %p, $3, 0; mov.b32 $0, 0; @%p st.release.sys.global.b64 [$1], $2; }"
)
_CLOCK = tl.constexpr("mov.u64 $0, %globaltimer; // $1")
_PAUSE = tl.constexpr("nanosleep.u32 100; mov.b32 $0, $1;")


@triton.jit
def load_acquire(words, mask):
    """int64 words [L] that peers may be storing; 0 where not `mask`."""
    if INTERPRETED:
        seen = tl.atomic_add(words, tl.full(mask.shape, 0, tl.int64), mask=mask, sem="acquire", scope="sys")
        return tl.where(mask, seen, 0)
    else:
        return tl.inline_asm_elementwise(
            _LOAD_ACQUIRE, "=&l,l,r", [words, mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def store_release(words, values, mask):
    """int64 values [L] into words that peers may be reading, after everything this thread stored or saw stored."""
    if INTERPRETED:
        tl.atomic_xchg(words, values, mask=mask, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            _STORE_RELEASE, "=&r,l,l,r", [words, values, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


if INTERPRETED:

    def now_ns(LANES):  # type: ignore[no-untyped-def]
        return time.monotonic_ns()

    def pause(LANES):  # type: ignore[no-untyped-def]
        time.sleep(2e-3)

else:

    @triton.jit
    def now_ns(LANES: tl.constexpr):
        """Nanoseconds on a clock that only differences mean something of."""
        lanes = tl.arange(0, LANES)
        return tl.max(tl.inline_asm_elementwise(_CLOCK, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1), 0)

    @triton.jit
    def pause(LANES: tl.constexpr):
        tl.inline_asm_elementwise(_PAUSE, "=r,r", [tl.arange(0, LANES)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def timeout_ns(record, LANES: tl.constexpr):
    return tl.max(tl.load(record + TIMEOUT_NS + tl.arange(0, LANES) * 0, volatile=True), 0)


@triton.jit
def aligned(number, ALIGN: tl.constexpr):
    """`number`, which ALIGN divides, so that the compiler knows it too (a hint on a kernel's argument is lost)."""
    return number // ALIGN * ALIGN


@triton.jit
def put_slice(destination, values, mask):
    """Store a tile of results where its receiver reads it."""
    tl.store(destination, values.to(destination.dtype.element_ty), mask=mask)


@triton.jit
def signal(words, epoch, low, mask):
    """Words [L] become {epoch, low [L]}: what this program has stored is visible before them."""
    tl.debug_barrier()
    store_release(words, (epoch << 32) | low, mask)


@triton.jit
def wait(words, epoch, mask, limit_ns, LANES: tl.constexpr):
    """Poll words [L] until all of `mask` carry exactly this epoch, or the limit is over; returns what was seen last."""
    seen = load_acquire(words, mask)
    missing = tl.sum((mask & ((seen >> 32) != epoch)).to(tl.int32), 0)
    start = now_ns(LANES)
    waited = start - start
    while (missing > 0) & (waited < limit_ns):
        pause(LANES)
        waited = now_ns(LANES) - start
        seen = load_acquire(words, mask)
        missing = tl.sum((mask & ((seen >> 32) != epoch)).to(tl.int32), 0)
    return seen
