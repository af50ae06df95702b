"""Slots of a channel on a device: the pieces of an arena that receive an output and become the tensor that is returned."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fused_ops.symmetric.cuda_graphs import Capture
from fused_ops.symmetric.cuda_memory import PeerArena, PinnedArena
from fused_ops.symmetric.device_lease import lend
from fused_ops.symmetric.segment_arena import SegmentArena
from fused_ops.symmetric.slots import over_storage

ARENA_SHIFT, PLACE_SHIFT = 26, 8  # a place is {arena: 6 bits, offset in 256-byte units: 26 bits}
MAX_ARENAS = 64
LARGEST_SLOT = 1 << (PLACE_SHIFT + ARENA_SHIFT)
SMALLEST_SLOT = 1 << 16
FEWEST_SLOTS = 2  # the first is for staging
SOME_SLOTS, SOME_BYTES = 8, 1 << 30  # so many slots, as long as they take no more
MOST_SLOTS, FEW_BYTES = 64, 1 << 26  # and more of those that are small


def slot_size_for(largest_output: int) -> int:
    return 1 << (max(largest_output, SMALLEST_SLOT) - 1).bit_length()


def slots_of(size: int) -> int:
    """How many slots of that size an arena on a device has."""
    wanted = max(FEWEST_SLOTS, min(SOME_SLOTS, SOME_BYTES // size), min(MOST_SLOTS, FEW_BYTES // size))
    return min(wanted, LARGEST_SLOT // size)


@dataclass(eq=False)
class Arena:
    """Slots of one size on every rank. Replaced by a larger one when a layout needs it; kept while anything uses it.
    `number` is the same on all ranks."""

    number: int
    slot_size: int
    memory: PeerArena | PinnedArena | SegmentArena
    base: int
    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)

    @property
    def in_a_graph(self) -> bool:
        """Some CUDA graph has its addresses: it must not be freed."""
        self.captures = [capture for capture in self.captures if not capture.over]
        return bool(self.captures)

    def capture(self, capture: Capture) -> bool:
        """A call in that capture uses the arena. True when it is the first."""
        if capture in self.captures:
            return False
        self.captures.append(capture)
        return True

    def free_slot(self, capture: Capture | None = None) -> Slot | None:
        """For a call in that capture, or outside of any. A capture leaves one slot to the calls outside."""
        free = [slot for slot in self.slots[1:] if slot.is_free(capture)]
        if capture is not None:
            own = next((slot for slot in free if slot.capture is capture), None)
            if own is not None or len(free) < 2:
                return own
            free[0].capture = capture
        return free[0] if free else None


@dataclass(eq=False)
class Slot:
    """A piece of an arena. `held` while a tensor views it, `posted` while a credit posted ahead names it, and of a `capture`
    from when a call in a CUDA graph was given it until nobody can replay that graph: calls of the same graph may follow one
    another in it, since a replay runs them in that order."""

    arena: Arena
    index: int
    held: bool = False
    posted: bool = False
    capture: Capture | None = None

    def is_free(self, capture: Capture | None = None) -> bool:
        if self.held or self.posted:
            return False
        if self.capture is not None and self.capture is not capture and self.capture.over:
            self.capture = None
        return self.capture is None or self.capture is capture

    @property
    def offset(self) -> int:
        return self.index * self.arena.slot_size

    @property
    def place(self) -> int:
        return (self.arena.number << ARENA_SHIFT) | (self.offset >> PLACE_SHIFT)

    @property
    def address(self) -> int:
        return self.arena.base + self.offset

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the slot's start; the slot is free again when its storage dies."""
        self.held = True
        return over_storage(self.lend(math.prod(shape) * dtype.itemsize), tuple(shape), dtype)

    def lend(self, nbytes: int) -> torch.Tensor:
        """Its first bytes as a tensor; `let_go` is called when that dies."""
        memory = self.arena.memory
        if isinstance(memory, SegmentArena):
            view = memoryview(memory.own.memory)[self.offset : self.offset + nbytes]
            weakref.finalize(view, self.let_go).atexit = False
            return torch.frombuffer(view, dtype=torch.uint8)
        return lend(self, self.address, nbytes, self.arena.device, self.let_go)

    def let_go(self) -> None:
        self.held = False
