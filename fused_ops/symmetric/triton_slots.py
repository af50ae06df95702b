"""Slots of a Triton channel: the pieces of an arena that receive an output and become the tensor that is returned."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_ops.symmetric.device_lease import lend
from fused_ops.symmetric.segment_arena import SegmentArena
from fused_ops.symmetric.slots import over_storage
from fused_ops.symmetric.triton_layout import ARENA_SHIFT, PLACE_SHIFT


@dataclass
class Arena:
    """Slots of one size on every rank; the first is for staging. `number` is the same on all ranks."""

    number: int
    slot_size: int
    memory: Any  # SegmentArena, PeerArena or PinnedArena
    base: int
    device: torch.device
    captured: bool = False  # a CUDA graph has its addresses: it must never be freed
    slots: list[Slot] = field(default_factory=list)

    def free_slot(self) -> Slot | None:
        return next((slot for slot in self.slots[1:] if not slot.held), None)


@dataclass
class Slot:
    """A piece of an arena, `held` while a tensor views it."""

    arena: Arena
    index: int
    held: bool = False

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
        nbytes = math.prod(shape) * dtype.itemsize
        self.held = True
        if isinstance(self.arena.memory, SegmentArena):
            view = memoryview(self.arena.memory.own.memory)[self.offset : self.offset + nbytes]
            weakref.finalize(view, self._let_go).atexit = False
            return over_storage(torch.frombuffer(view, dtype=torch.uint8), tuple(shape), dtype)
        memory = lend(self, self.address, nbytes, self.arena.device, self._let_go)
        return over_storage(memory, tuple(shape), dtype)

    def _let_go(self) -> None:
        self.held = False
