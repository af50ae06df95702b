"""A channel of the CUDA backend: device state, arenas of slots, launch parameters, and the error record.

The epoch, the credits and the flags live in device memory and are the kernels' business (native/cuda_call.cuh). This side
picks the slot of each call and the one to post ahead, grows arenas when all ranks agree on a larger layout, and raises what
kernels recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fused_ops import exposed
from fused_ops.errors import CommunicationError, PeerAbortedError, PeerTimeoutError
from fused_ops.symmetric import agreement as host
from fused_ops.symmetric.agreement import Agreement
from fused_ops.symmetric.cuda_graphs import current_capture
from fused_ops.symmetric.cuda_memory import (
    PeerArena,
    PinnedArena,
    check_cuda,
    check_structs,
    choose_link,
    library,
)
from fused_ops.symmetric.cuda_tables import DeviceTables
from fused_ops.symmetric.device_arenas import DeviceArenas
from fused_ops.symmetric.device_slots import Arena, Slot
from fused_ops.symmetric.group import GroupContext

NO_PLACE = 0xFFFFFFFF
MAX_FOLLOWED = 1024
MAX_NOTES = 256
MAX_SLICES = 8
SLICE_BYTES = (
    1 << 18
)  # data for one peer is cut where delivery can overlap with sending, into parts not smaller than this
RECEIVE_FIRST_BLOCKS = {
    "peer": 0,
    "pinned": 16,
}  # from host memory delivery takes as long as sending, and overlaps with it
MOST_TILES_A_RUN = 8  # that a warp claims at a time
SPARE_SMS = 8  # of a device, left to kernels that are no part of a call
HALTED, BAD_INDEX, BAD_OFFSET = 9, 10, 11


logger = logging.getLogger("fused_ops")
BadValueText = Callable[[bool, int, int, int], str]  # (an index? or an offset, feature, position, value)
_checking = False
_live: weakref.WeakSet[CudaChannel] = weakref.WeakSet()
_operators: list[str] = []  # by the number that kernels know them by


def _operator_id(name: str) -> int:
    if name not in _operators:
        _operators.append(name)
    return _operators.index(name)


def _plain_text(index: bool, feature: int, position: int, value: int) -> str:
    return f"{'index' if index else 'offset'} {value} (position {position}, feature {feature}) is wrong"


def set_checking(checking: bool) -> None:
    """Look for what kernels find wrong at the end of every call, at the price of a synchronisation: the error is then raised
    by the very call, not by the next one, by `check_errors`, or at the end of the step."""
    global _checking
    _checking = checking


class LinkParams(ctypes.Structure):
    _fields_ = [
        ("control", ctypes.c_void_p),
        ("arenas", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
    ]


class CallParams(ctypes.Structure):
    """`CallParams` of native/cuda_state.cuh."""

    _fields_ = [
        ("link", LinkParams),
        ("state", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("output_bytes", ctypes.c_int64),
        ("tag", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("next_tag", ctypes.c_uint32),
        ("next_place", ctypes.c_uint32),
        ("operator_id", ctypes.c_uint32),
        ("stress_delay_us", ctypes.c_uint32),
        ("call_number", ctypes.c_int64),
        ("abort", ctypes.c_int32),
        ("heeds_halt", ctypes.c_int32),
        ("slices", ctypes.c_int32),
        ("most_tiles_a_run", ctypes.c_int32),
        ("local_first_warps", ctypes.c_int32),
        ("receive_first_blocks", ctypes.c_int32),
    ]


class Record(ctypes.Structure):
    """`Record` of native/cuda_state.cuh."""

    _fields_ = [
        ("wait_ns", ctypes.c_uint64),
        ("serial", ctypes.c_uint32),
        ("code", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("epoch", ctypes.c_uint32),
        ("operator_id", ctypes.c_uint32),
        ("late", ctypes.c_uint64),
        ("call_number", ctypes.c_int64),
        ("bad_feature", ctypes.c_int64),
        ("bad_position", ctypes.c_int64),
        ("bad_value", ctypes.c_int64),
    ]


class CudaChannel:
    """One lane of a group's device memory. Made collectively by `GroupContext.channel`."""

    def __init__(self, group: GroupContext, index: int, device: torch.device) -> None:
        self.group, self.index, self.device = group, index, device
        self.rank, self.world = group.rank, group.world
        self.lib = library(device.index)
        check_structs(self.lib, {"record": Record, "call_params": CallParams})
        for load in (
            self.lib.fo_cuda_all_to_all_load,
            self.lib.fo_cuda_embedding_all_to_all_load,
            self.lib.fo_cuda_rows_load,
        ):
            check_cuda(self.lib, load(), "loading the kernels")
        self.agreement = Agreement(group, "cuda", index)
        self.link, self._sharing = choose_link(group, device)
        self._sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        arena_type = PeerArena if self.link == "peer" else PinnedArena
        self._control = arena_type(group, device, self.lib.fo_cuda_control_bytes())
        self._control_table = torch.tensor(self._control.addresses, dtype=torch.int64, device=device)
        self.arenas = DeviceArenas(group, device, arena_type, f"cuda channel {index}")
        self._state = torch.zeros(self.lib.fo_cuda_state_bytes(), dtype=torch.uint8, device=device)
        self._record_memory = torch.zeros(ctypes.sizeof(Record), dtype=torch.uint8, pin_memory=True)
        self._record = Record.from_address(self._record_memory.data_ptr())
        self._posted: tuple[int, Slot] | None = None
        self._followed_by: dict[int, tuple[int, int]] = {}
        self._previous_tag: int | None = None
        self._stream: torch.cuda.Stream | None = None
        self._seen_wait_ns = 0
        self._stress_delay_us = 0
        self._notes: dict[int, BadValueText] = {}
        self._captured_notes: dict[int, BadValueText] = {}
        self.tables = DeviceTables(device)
        self.side_stream = torch.cuda.Stream(device)
        self.launches = 0
        self.set_timeout(group.timeout_s)
        torch.cuda.current_stream(device).synchronize()
        group.exchange(f"cuda channel {index}", {})
        _live.add(self)

    @property
    def sms(self) -> int:
        """SMs that a kernel of this channel may fill, so that the kernels of all channels, and of all ranks that share the
        device, are resident together: each waits for others, and none may keep the one out that it waits for."""
        here = [channel for channel in _live if channel.device == self.device]
        sharing = max(channel._sharing for channel in here)
        return max(1, (self._sm_count - SPARE_SMS) // (sharing * len(here)))

    @property
    def bytes(self) -> int:
        return self._control.size + self.arenas.bytes

    def set_timeout(self, seconds: float) -> None:
        self.agreement.set_timeout(seconds)
        start = self.lib.fo_cuda_timeout_offset()
        with torch.cuda.device(self.device):
            self._state[start : start + 8].view(torch.int64).fill_(int(seconds * 1e9))
            torch.cuda.current_stream(self.device).synchronize()  # for the kernels of any stream

    def set_stress_delay(self, max_us: int, seed: int) -> None:
        """Stress tests: wait up to that long between a slice's data and its flag (the seed is in the epoch)."""
        del seed
        self._stress_delay_us = max_us

    @contextmanager
    def call(self, operator: str) -> Iterator[int]:
        """One call. When this rank rejects its input, a kernel tells the peers' kernels so."""
        launched = self.launches
        try:
            with self.agreement.call(operator) as number:
                self.check_errors()
                yield number
        except Exception:
            # Peers may be running this call's kernel already, or be about to: this rank's part of the epoch is to say no.
            if self.launches == launched and not torch.cuda.is_current_stream_capturing():
                with contextlib.suppress(RuntimeError):  # the error that is on its way says more
                    self._reject()
            raise
        if _checking and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()
            self.check_errors()

    def reserve(self, largest_output: int) -> None:
        """Make every rank's slots hold `largest_output` bytes. Collective when it grows; all ranks pass the same number."""
        if not self.arenas.hold(largest_output):
            self.arenas.grow(self.agreement.operator, largest_output, self._finish)
            self._posted = None

    def _finish(self) -> None:
        current = torch.cuda.current_stream(self.device)
        for stream in {current, self._stream or current}:
            stream.synchronize()

    def receive(self, tag: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, CallParams]:
        """This call's output tensor and launch parameters. `reserve` comes first."""
        nbytes = math.prod(shape) * dtype.itemsize
        arena, capture = self.arenas.newest, current_capture(self.device)
        if capture is not None:
            if arena.capture(capture):  # the graph has their addresses, whatever becomes of the group
                capture.keep((self._state, self._record_memory, self._control_table, self.arenas.table))
            slot = arena.free_slot(capture) if nbytes else None
            if nbytes and slot is None and self.link == "peer":
                logger.info("%s: no slot left for a captured call, it copies out", self.agreement.operator)
        else:
            slot = self._claim(tag, arena)  # also takes back a slot that was posted for another call
            slot = slot if nbytes else None
        if slot is None:
            slot = arena.slots[0]
            output = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        else:
            output = slot.tensor(shape, dtype)
        params = self._params(tag, slot.place)
        params.output = output.data_ptr()
        params.output_bytes = nbytes
        if capture is None:
            self._choose_next(tag, nbytes, arena, params)
        return output, params

    def launch_done(self, code: int) -> None:
        """Take note of a launch, by its native return code."""
        check_cuda(self.lib, code, f"{self.agreement.operator}: kernel launch")
        self.launches += 1

    def check_errors(self) -> None:
        """Raise what a kernel recorded; account for its waits. Reads pinned memory, never blocks."""
        waited = self._record.wait_ns
        exposed.add_ns(waited - self._seen_wait_ns)
        self._seen_wait_ns = waited
        if self._record.serial:
            error = self._error_of_record()
            self._record.serial = 0
            if not torch.cuda.is_current_stream_capturing():
                self._clear_halt()
            if isinstance(error, PeerTimeoutError):
                self.agreement.give_up(error)
            raise error

    def _error_of_record(self) -> Exception:
        r = self._record
        where = (
            f"{_operators[r.operator_id]}: rank {self.rank} of group '{self.group.name}', channel {self.index}, "
            f"call {r.call_number} (epoch {r.epoch}), {host.PHASES.get(r.phase, '')}"
        )
        if r.code == HALTED:
            return CommunicationError(
                f"{where}: follows a call that failed and was not raised yet; nothing was updated"
            )
        if r.code in (BAD_INDEX, BAD_OFFSET):
            text = self._notes.get(r.call_number) or self._captured_notes.get(r.call_number, _plain_text)
            return ValueError(f"{where}: {text(r.code == BAD_INDEX, r.bad_feature, r.bad_position, r.bad_value)}")
        if r.code == host.BROKEN:
            since = self.agreement.broken
            return CommunicationError(f"{where}: ran on a channel that is broken since: {since}")
        if r.code == host.TIMEOUT:
            late = sorted({r.peer} | {p for p in range(self.world) if r.late >> p & 1 and p != self.rank})
            return PeerTimeoutError(f"{where}: waited {self.group.timeout_s:g} s; ranks that did not arrive: {late}")
        reason = self.agreement.reason(r.peer, r.call_number)
        if r.code == host.REJECTED and not self.agreement.disagrees(r.peer, r.call_number):
            return PeerAbortedError(f"{where}: rank {r.peer} rejected its input or gave up: {reason}")
        mine = self.agreement.reason(self.rank, r.call_number)
        return ValueError(f"{where}: ranks disagree: rank {self.rank} has [{mine}], rank {r.peer} has [{reason}]")

    def _claim(self, tag: int, arena: Arena) -> Slot | None:
        posted, self._posted = self._posted, None
        if posted is not None:
            posted_tag, slot = posted
            slot.posted = False
            if posted_tag == tag and slot.arena is arena:
                return slot
        return arena.free_slot()

    def _choose_next(self, tag: int, nbytes: int, arena: Arena, params: CallParams) -> None:
        """Which slot the kernel posts ahead when it is done, for the layout that followed this one before."""
        if self._previous_tag is not None:
            if len(self._followed_by) >= MAX_FOLLOWED:  # ragged layouts
                self._followed_by.clear()
            self._followed_by[self._previous_tag] = (tag, nbytes)
        self._previous_tag = tag
        params.next_place = NO_PLACE
        predicted = self._followed_by.get(tag)
        if predicted is None or predicted[1] > arena.slot_size:
            return
        slot = arena.slots[0] if self.link == "pinned" or predicted[1] == 0 else arena.free_slot()
        if slot is None:
            return
        params.next_tag, params.next_place = predicted[0], slot.place
        if slot.index or self.link == "peer":
            self._posted = (predicted[0], slot)
            slot.posted = slot.index > 0

    def _params(self, tag: int, place: int) -> CallParams:
        link = LinkParams(self._control_table.data_ptr(), self.arenas.table.data_ptr(), self.rank, self.world)
        return CallParams(
            link=link,
            state=self._state.data_ptr(),
            record=self._record_memory.data_ptr(),
            tag=tag,
            place=place,
            next_place=NO_PLACE,
            operator_id=_operator_id(self.agreement.operator),
            stress_delay_us=self._stress_delay_us,
            call_number=self.agreement.call_number,
            slices=1,
            most_tiles_a_run=MOST_TILES_A_RUN,
            receive_first_blocks=RECEIVE_FIRST_BLOCKS[self.link],
        )

    def _reject(self) -> None:
        params = self._params(0, 0)
        params.abort = 1
        with torch.cuda.device(self.device):
            self.launch_done(self.lib.fo_cuda_reject(ctypes.byref(params), self.stream_pointer()))

    def slices(self, largest_pair_bytes: int) -> int:
        """Parts to send each peer's data in, where that helps. All ranks pass the same number."""
        return min(MAX_SLICES, max(1, largest_pair_bytes // SLICE_BYTES)) if self.link == "pinned" else 1

    def note(self, text: BadValueText) -> None:
        """How to say what a kernel of this call finds wrong with a value."""
        number = self.agreement.call_number
        if torch.cuda.is_current_stream_capturing():
            self._captured_notes[number] = text
            return
        self._notes[number] = text
        if len(self._notes) > MAX_NOTES:
            del self._notes[next(iter(self._notes))]

    @property
    def halted_address(self) -> int:
        """Of an int32 that is not zero while a failed call waits to be raised: kernels that change tables heed it."""
        return self._state.data_ptr() + self.lib.fo_cuda_halted_offset()

    @property
    def state_address(self) -> int:
        return self._state.data_ptr()

    def _clear_halt(self) -> None:
        start = self.lib.fo_cuda_halted_offset()
        self.stream_pointer()  # after the channel's kernels so far
        self._state[start : start + 4].zero_()

    def stream_pointer(self) -> ctypes.c_void_p:
        """The current stream, made to follow the one this channel was last used on."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream if not torch.cuda.is_current_stream_capturing() else self._stream
        return ctypes.c_void_p(stream.cuda_stream)


def cuda_channel(group: GroupContext, index: int, device: torch.device) -> CudaChannel:
    channel = group.channel("cuda", index, lambda g, i: CudaChannel(g, i, device))
    if channel.device != device:
        raise ValueError(f"channel {index} of group '{group.name}' lives on {channel.device}; got a tensor on {device}")
    return channel
