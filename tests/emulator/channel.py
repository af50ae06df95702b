"""CUDA channels of several ranks in one process: host memory, and kernels that the emulator runs.

Of an arena only the bytes of outputs that are alive may be touched; the address sanitizer watches over the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from unittest import mock

import torch

from fused_ops.backends.cuda.embedding_native import Lookups
from fused_ops.backends.cuda.embedding_update import sort_lookups
from fused_ops.symmetric.cuda_channel import CudaChannel, Record
from fused_ops.symmetric.cuda_memory import INT64_RESULTS, MAX_RANKS
from fused_ops.symmetric.device_slots import MAX_ARENAS, PLACE_SHIFT, Arena, Slot
from tests.emulator.build import build

SLOTS = {"peer": 8, "pinned": 1}  # of an arena


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build()))
    for name in INT64_RESULTS:
        getattr(lib, f"fo_cuda_{name}").restype = ctypes.c_int64
    return lib


def forbid(address: int, size: int) -> None:
    library().__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))


def allow(address: int, size: int) -> None:
    library().__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))


class HostTables:
    """`DeviceTables` in host memory of the exact size."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}

    def address(self, key: Hashable, make: Callable[[], ctypes.Array]) -> int:
        if key not in self._kept:
            content = bytes(make())
            self._kept[key] = torch.empty(len(content), dtype=torch.uint8)
            ctypes.memmove(self._kept[key].data_ptr(), content, len(content))
        return self._kept[key].data_ptr()


class HostSlot(Slot):
    def lend(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self.arena.slot_size, f"an output of {nbytes} bytes in a slot of {self.arena.slot_size}"
        allow(self.address, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
        weakref.finalize(memory, self._end, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _end(self, nbytes: int) -> None:
        forbid(self.address, nbytes)
        self.let_go()


class World:
    """The memory that all ranks address."""

    def __init__(self, ranks: int, link: str) -> None:
        self.ranks, self.link = ranks, link
        self._controls = [torch.zeros(library().fo_cuda_control_bytes(), dtype=torch.uint8) for _ in range(ranks)]
        self.control_table = torch.tensor([control.data_ptr() for control in self._controls])
        self._arenas: list[list[torch.Tensor]] = []  # by number and rank
        self.arena_table = torch.zeros(MAX_ARENAS * MAX_RANKS, dtype=torch.int64)

    def arena(self, number: int, slot_size: int, rank: int) -> torch.Tensor:
        """Made for all ranks when the first one asks."""
        if number == len(self._arenas):
            memories = [torch.empty(SLOTS[self.link] * slot_size, dtype=torch.uint8) for _ in range(self.ranks)]
            for r, memory in enumerate(memories):
                self.arena_table[number * MAX_RANKS + r] = memory.data_ptr()
                forbid(memory.data_ptr(), memory.numel())
            self._arenas.append(memories)
        return self._arenas[number][rank]


class EmulatedArenas:
    """A rank's part of the world's arenas, each as small as the layout allows, so that too small is an error."""

    def __init__(self, world: World, rank: int, device: torch.device) -> None:
        self._world, self._rank, self._device = world, rank, device
        self.table = world.arena_table
        self.newest: Arena | None = None
        self._count = 0

    def hold(self, largest_output: int) -> bool:
        return self.newest is not None and self.newest.slot_size >= largest_output

    def grow(self, operator: str, largest_output: int, finish: Callable[[], None]) -> None:
        slot_size = 1 << max(PLACE_SHIFT, (largest_output - 1).bit_length())
        memory = self._world.arena(self._count, slot_size, self._rank)
        arena = Arena(self._count, slot_size, memory, memory.data_ptr(), self._device)  # type: ignore[arg-type]
        arena.slots = [HostSlot(arena, i) for i in range(SLOTS[self._world.link])]
        if self._world.link == "pinned":  # its one slot is where all outputs arrive, to be copied out
            allow(memory.data_ptr(), slot_size)
        self.newest = arena
        self._count += 1


class EmulatedAgreement:
    """Ranks that always agree."""

    def __init__(self) -> None:
        self.operator, self.call_number = "", 0

    def agree(self, facts: tuple, row: None = None) -> tuple[int, list]:
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") & 0x3FFFFFFF, []


class EmulatedChannel(CudaChannel):
    """Slots, credits posted ahead and launch parameters are the product's; memory, streams and the agreement are not."""

    def __init__(self, world: World, rank: int, timeout_s: float) -> None:
        self.rank, self.world, self.link = rank, world.ranks, world.link
        self.index, self.device = 0, torch.device("cpu")
        self.group = types.SimpleNamespace(rank=rank, world=world.ranks, name="emulated")  # type: ignore[assignment]
        self.lib = library()
        self.agreement = EmulatedAgreement()  # type: ignore[assignment]
        self._memory = world
        self._control_table = world.control_table
        self.arenas = EmulatedArenas(world, rank, self.device)  # type: ignore[assignment]
        self._state = torch.zeros(self.lib.fo_cuda_state_bytes(), dtype=torch.uint8)
        start = self.lib.fo_cuda_timeout_offset()
        self._state[start : start + 8].view(torch.int64).fill_(int(timeout_s * 1e9))
        self._record_memory = torch.zeros(ctypes.sizeof(Record), dtype=torch.uint8)
        self.record = self._record = Record.from_address(self._record_memory.data_ptr())
        self._posted = None
        self._followed_by: dict[int, tuple[int, int]] = {}
        self._previous_tag = None
        self._stress_delay_us = 0
        self._notes, self._captured_notes = {}, {}
        self.tables = HostTables()  # type: ignore[assignment]
        self.side_stream = Stream()  # type: ignore[assignment]
        self.launches = 0
        self.stream: int | None = None  # calls of one follow one another, where `together` holds several of a rank

    @property
    def sms(self) -> int:
        return 2

    @contextlib.contextmanager
    def call(self, operator: str) -> Iterator[int]:
        self.agreement.operator = operator
        self.agreement.call_number += 1
        yield self.agreement.call_number

    def stream_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream)


class Stream:
    cuda_stream = 0

    def wait_stream(self, other: Stream) -> None:
        """Launches run in the order in which they were made."""


@contextlib.contextmanager
def backend_of(channels: list[EmulatedChannel]) -> Iterator[None]:
    """The CUDA backend's modules work with these channels, by rank."""
    patches = {
        "fused_ops.backends.cuda.embedding_all_to_all.cuda_channel": lambda group, index, device: channels[group.rank],
        "fused_ops.backends.cuda.embedding_update.cuda_channel": lambda group, index, device: channels[group.rank],
        "fused_ops.backends.cuda.embedding_all_to_all.load_kernels": lambda device_index: None,
        "fused_ops.backends.cuda.embedding_all_to_all.sort_lookups": _sort_at_once,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.device": lambda device: contextlib.nullcontext(),
        "torch.cuda.current_stream": lambda device=None: Stream(),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(mock.patch(name, replacement))
        yield


def together(issue: Callable[[int], object], ranks: int) -> list:
    """`issue(rank)` of every rank, then the kernels that they launched, all at once."""
    library().emulator_hold(1)
    results = [issue(rank) for rank in range(ranks)]
    library().emulator_run()
    return results


def _sort_at_once(lookups: Lookups, order: torch.Tensor, stream: Stream) -> list[torch.Tensor]:
    """On its stream the sort depends on nothing that `together` holds back."""
    library().emulator_hold(0)
    kept = sort_lookups(lookups, order, stream)  # type: ignore[arg-type]
    library().emulator_hold(1)
    return kept
