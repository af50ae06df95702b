"""Slots: the pieces of shared memory that receive an operator's output and become the tensor it returns.

A slot is free when the last tensor that views it has died. The pool grows to its budget and no further; past it the caller
takes the staging slot and copies out.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable

import torch

from fused_ops.symmetric.segment import SharedSegment

SMALLEST_SLOT = 1 << 16
DEFAULT_BUDGET = 4 << 30
MOST_SLOTS = 64  # each costs two file descriptors here (mmap keeps its own) and a mapping in every peer


class Slot:
    """One shared-memory file. `held` while a tensor views it, `pinned` while a call or a posted credit uses it."""

    def __init__(self, identity: int, size: int) -> None:
        self.identity = identity
        self.segment = SharedSegment.create(size)
        self.size = size
        self.held = False
        self.pinned = False
        self.quarantined_call: int | None = None  # peers may still write until they have passed this call

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the start of the slot; the slot is free again when its storage dies."""
        view = memoryview(self.segment.memory)[: math.prod(shape) * dtype.itemsize]
        self.held = True
        weakref.finalize(view, self._let_go).atexit = False
        return over_storage(torch.frombuffer(view, dtype=torch.uint8), shape, dtype)

    def _let_go(self) -> None:
        self.held = False


def over_storage(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over the start of `memory`'s storage. Not a view: autograd lets nobody change a view that a custom
    operator returns in place."""
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), 0, shape, strides)


class SlotPool:
    def __init__(self, passed_call: Callable[[], int], budget: int = DEFAULT_BUDGET) -> None:
        """`passed_call()`: the newest call that every peer has begun."""
        self._passed_call = passed_call
        self.budget = budget
        self._slots: list[Slot] = []
        self._staging: Slot | None = None
        self._identities = itertools.count(1)

    @property
    def bytes(self) -> int:
        return sum(slot.size for slot in self._slots) + (self._staging.size if self._staging else 0)

    @property
    def oldest_live(self) -> int:
        """Peers unmap every slot of this rank with a smaller identity."""
        live = [slot.identity for slot in self._slots] + ([self._staging.identity] if self._staging else [])
        return min(live, default=0)

    def take(self, size: int) -> Slot | None:
        """A free slot of at least `size` bytes, pinned; None when the budget is spent on slots that are held."""
        fitting = [slot for slot in self._slots if slot.size >= size and self._is_free(slot)]
        if fitting:
            slot = min(fitting, key=lambda s: s.size)
        else:
            slot_size = _round_up(size)
            if self._is_full(slot_size):
                self._drop_free()
            if self._is_full(slot_size):
                return None
            slot = Slot(next(self._identities), slot_size)
            self._slots.append(slot)
        slot.pinned = True
        return slot

    def staging(self, size: int) -> Slot:
        """The slot whose content is copied out at once. One call at a time uses it."""
        slot = self._staging
        if slot is None or slot.size < size or slot.quarantined_call is not None:
            if slot is not None:
                slot.segment.release()
            self._staging = Slot(next(self._identities), _round_up(size))
        assert self._staging is not None
        self._staging.pinned = True
        return self._staging

    def _is_free(self, slot: Slot) -> bool:
        if slot.quarantined_call is not None and self._passed_call() > slot.quarantined_call:
            slot.quarantined_call = None
        return not slot.held and not slot.pinned and slot.quarantined_call is None

    def _is_full(self, more: int) -> bool:
        return self.bytes + more > self.budget or len(self._slots) >= MOST_SLOTS

    def _drop_free(self) -> None:
        for slot in [s for s in self._slots if self._is_free(s)]:
            slot.segment.release()
            self._slots.remove(slot)


def _round_up(size: int) -> int:
    """To 2^k or 1.5 * 2^k, so that sizes that wander a little share slots."""
    size = max(size, SMALLEST_SLOT)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power
