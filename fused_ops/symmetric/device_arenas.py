"""The arenas of a channel on a device: memory that all ranks address, replaced by larger memory when a layout needs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fused_ops.symmetric.cuda_memory import MAX_RANKS, PeerArena, PinnedArena
from fused_ops.symmetric.device_slots import LARGEST_SLOT, MAX_ARENAS, Arena, Slot, slot_size_for, slots_of
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment_arena import SegmentArena

ArenaType = type[PeerArena] | type[PinnedArena] | type[SegmentArena]


class DeviceArenas:
    """`table`: int64 [MAX_ARENAS, MAX_RANKS] on the device, where each rank's slots live."""

    def __init__(self, group: GroupContext, device: torch.device, arena_type: ArenaType, lane: str) -> None:
        """`lane`: what peers call the channel that the arenas are of."""
        self._group, self._device, self._type, self._lane = group, device, arena_type, lane
        self.table = torch.zeros(MAX_ARENAS * MAX_RANKS, dtype=torch.int64, device=device)
        self._arenas: list[Arena] = []  # the newest last; older ones that a graph has the addresses of
        self._count = 0

    @property
    def newest(self) -> Arena:
        return self._arenas[-1]

    @property
    def bytes(self) -> int:
        return sum(arena.memory.size for arena in self._arenas)

    def hold(self, largest_output: int) -> bool:
        return bool(self._arenas) and self.newest.slot_size >= largest_output

    def grow(self, operator: str, largest_output: int, finish: Callable[[], None]) -> None:
        """Make every rank's slots hold `largest_output` bytes. Collective; `finish()` returns when this rank's kernels in flight
        have ended."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{operator}: this layout needs slots of {largest_output} bytes, which cannot be allocated inside a CUDA "
                "graph capture: call the operator once with this shape before capturing"
            )
        if largest_output > LARGEST_SLOT:
            raise ValueError(
                f"{operator}: one call moves at most {LARGEST_SLOT >> 30} GiB to a rank, got {largest_output} bytes"
            )
        if self._count == MAX_ARENAS:
            raise ValueError(f"{self._lane} of group '{self._group.name}' has grown {MAX_ARENAS} times")
        self._retire(finish)
        size = slot_size_for(largest_output)
        slots = 1 if self._type is PinnedArena else slots_of(size)  # what arrives in host memory is always copied out
        memory = self._type(self._group, self._device, slots * size)
        arena = Arena(self._count, size, memory, memory.addresses[self._group.rank], self._device)
        arena.slots = [Slot(arena, i) for i in range(slots)]
        start = self._count * MAX_RANKS
        self.table[start : start + self._group.world] = torch.tensor(memory.addresses, dtype=torch.int64)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._arenas.append(arena)
        self._count += 1

    def _retire(self, finish: Callable[[], None]) -> None:
        """Kernels in flight may still use what is given up: all ranks finish theirs, then all unmap, then it may go."""
        finish()
        mine = [arena.number for arena in self._arenas if arena.in_a_graph]
        # What one rank's graphs hold, all keep: ranks hear at different times that a graph is gone.
        kept = {
            number for peer in self._group.exchange(f"{self._lane} grows", {"kept": mine}) for number in peer["kept"]
        }
        outgrown = [arena for arena in self._arenas if arena.number not in kept]
        self._arenas = [arena for arena in self._arenas if arena not in outgrown]
        for arena in outgrown:
            arena.memory.close_peers()
        self._group.exchange(f"{self._lane} unmapped", {})
        for arena in outgrown:
            arena.memory.allow_free()
            arena.slots.clear()  # so that it is freed with the last tensor in it, not by a garbage collection
