"""A channel of the Triton backend: the memory that its kernels share, the slots they store into, and the error record.

Epochs, credits and flags live in memory of the device and are the kernels' business (backends/triton). On a CPU host, where
Triton's interpreter runs them, that is shared memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fused_ops import exposed
from fused_ops.errors import CommunicationError, PeerAbortedError, PeerTimeoutError
from fused_ops.symmetric import agreement as host
from fused_ops.symmetric.agreement import Agreement
from fused_ops.symmetric.cuda_graphs import current_capture
from fused_ops.symmetric.cuda_memory import PeerArena, PinnedArena, choose_link
from fused_ops.symmetric.device_arenas import ArenaType, DeviceArenas
from fused_ops.symmetric.device_slots import Slot
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment_arena import SegmentArena
from fused_ops.symmetric.triton_layout import (
    BAD_VALUE,
    CONTROL_BYTES,
    NO_PROBLEM,
    RECORD_WORDS,
    STATE_WORDS,
    Record,
    State,
)

SHARED_MEMORY = "shared memory"
ARENA_OF_LINK: dict[str, ArenaType] = {
    "peer": PeerArena,
    "pinned": PinnedArena,
    SHARED_MEMORY: SegmentArena,
}
MOST_CONSTANTS = 256
MOST_CALLS_DESCRIBED = 64

_live: weakref.WeakSet[TritonChannel] = weakref.WeakSet()

DescribeProblem = Callable[[int, int, int, int], str]  # (kind, position, value, feature) -> what is wrong


@dataclass
class Receipt:
    """Where this call's output arrives, and the tensor to return."""

    slot: Slot
    output: torch.Tensor
    is_staged: bool

    @property
    def nbytes(self) -> int:
        return self.output.nbytes

    def deliver(self) -> torch.Tensor:
        """The output; out of the staging slot where it is there. After the call's last kernel was launched."""
        if self.is_staged:
            self.output.copy_(self.slot.tensor(self.output.shape, self.output.dtype))
        return self.output


class TritonChannel:
    """One lane of a group's device memory. Made collectively by `GroupContext.channel`.

    abort: launches the kernel by which this rank tells its peers that it rejected the call.
    """

    def __init__(
        self, group: GroupContext, index: int, device: torch.device, abort: Callable[[TritonChannel], None]
    ) -> None:
        self.group, self.index, self.device = group, index, device
        self.rank, self.world = group.rank, group.world
        self._abort = abort
        self.agreement = Agreement(group, "triton", index)
        self.link, self._sharing = choose_link(group, device) if device.type == "cuda" else (SHARED_MEMORY, group.world)
        arena_type = ARENA_OF_LINK[self.link]
        self._control = arena_type(group, device, CONTROL_BYTES)
        self.control = torch.tensor(self._control.addresses, dtype=torch.int64, device=device)
        self.arenas = DeviceArenas(group, device, arena_type, f"triton channel {index}")
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self.state[State.PROBLEM] = NO_PROBLEM
        self._record_memory = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._record = (ctypes.c_int64 * RECORD_WORDS).from_address(self.record)
        self._constants: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._described: OrderedDict[int, tuple[str, DescribeProblem]] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._seen_wait_ns = 0
        self.finished_calls = 0
        self.stress_delay_us = 0
        self.set_timeout(group.timeout_s)
        self._synchronize()
        group.exchange(f"triton channel {index}", {})
        _live.add(self)

    @property
    def sms(self) -> int:
        """SMs that a kernel of this channel may fill, so that the kernels of all channels, and of all ranks that share the
        device, are resident together: each waits for others, and none may keep the one out that it waits for."""
        if self.device.type == "cpu":
            return 1  # the interpreter runs one program after another
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        channels = sum(channel.device == self.device for channel in _live)
        return max(1, count // (self._sharing * channels))

    @property
    def record(self) -> int:
        """The record's address, on the host and on the device."""
        return self._record_memory.data_ptr()

    @property
    def bytes(self) -> int:
        return self._control.size + self.arenas.bytes

    def set_timeout(self, seconds: float) -> None:
        self.agreement.set_timeout(seconds)
        self._record[Record.TIMEOUT_NS] = int(seconds * 1e9)

    def set_stress_delay(self, max_us: int, seed: int) -> None:
        """Stress tests: wait up to that long between a slice's data and its flag (the seed is in the epoch)."""
        del seed
        self.stress_delay_us = max_us

    @contextmanager
    def call(self, operator: str) -> Iterator[int]:
        """One call. When this rank rejects its input, a kernel tells the peers' kernels so."""
        finished = self.finished_calls
        with self.on_device():
            try:
                with self.agreement.call(operator) as number:
                    self.check_errors()
                    self._follow_stream()
                    yield number
            except (ValueError, PeerAbortedError):
                # Peers may be running this call's kernels already, or be about to: this rank's part is to say no.
                if self.agreement.broken is None and self.finished_calls == finished and not self._is_capturing():
                    self._abort(self)
                raise

    def on_device(self) -> AbstractContextManager:
        """Kernels are launched on the current device: make it the channel's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def describe(self, describe_problem: DescribeProblem) -> None:
        """What to say if a kernel of the present call finds a wrong offset or index."""
        if len(self._described) >= MOST_CALLS_DESCRIBED:
            self._described.popitem(last=False)
        self._described[self.agreement.call_number] = (self.agreement.operator, describe_problem)

    def constants(self, values: Sequence[int]) -> torch.Tensor:
        """Those integers in device memory, int64; copied there when they are new."""
        key = tuple(values)
        known = self._constants.get(key)
        if known is None:
            if self._is_capturing():
                raise ValueError(
                    f"{self.agreement.operator}: this layout, or where its tables are, is new to channel {self.index}, and "
                    "cannot be copied to the device inside a CUDA graph capture: call the operator once before capturing"
                )
            known = torch.tensor(key, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            known = known.to(self.device, non_blocking=True)
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.popitem(last=False)
            self._constants[key] = known
        self._constants.move_to_end(key)
        if capture := current_capture(self.device):
            capture.keep(known)
        return known

    def reserve(self, largest_output: int) -> None:
        """Make every rank's slots hold `largest_output` bytes. Collective when it grows; all ranks pass the same number."""
        if not self.arenas.hold(largest_output):
            self.arenas.grow(self.agreement.operator, largest_output, self._synchronize)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Receipt:
        """The place of this call's output. `reserve` comes first."""
        arena, capture = self.arenas.newest, current_capture(self.device)
        if capture is not None and arena.capture(
            capture
        ):  # the graph has their addresses, whatever becomes of the group
            capture.keep((self.state, self._record_memory, self.control, self.arenas.table))
        slot = None if 0 in shape else arena.free_slot(capture)
        if slot is not None:
            return Receipt(slot, slot.tensor(shape, dtype), is_staged=False)
        output = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return Receipt(arena.slots[0], output, is_staged=output.numel() > 0)

    def check_errors(self) -> None:
        """Raise what a kernel recorded; account for its waits. Reads host memory, never blocks."""
        waited = self._record[Record.WAIT_NS]
        exposed.add_ns(waited - self._seen_wait_ns)
        self._seen_wait_ns = waited
        if not self._record[Record.SERIAL]:
            return
        error, late = self._error_of_record(), self._ranks(self._record[Record.LATE])
        self._record[Record.SERIAL] = 0
        if isinstance(error, PeerTimeoutError):
            self.agreement.give_up(error)
        elif late:
            self.agreement.give_up(PeerTimeoutError(f"ranks {late} did not arrive, beside this: {error}"))
        else:
            self.state[State.SUPPRESSED] = 0  # in stream order: what was launched before stays suppressed
        raise error

    def _error_of_record(self) -> Exception:
        record = {name: self._record[name] for name in Record}
        code, call = record[Record.CODE], record[Record.CALL]
        operator, describe_problem = self._described.get(call, (self.agreement.operator, _describe_by_numbers))
        if code == BAD_VALUE:
            kind, at = record[Record.PROBLEM_KIND], record[Record.PROBLEM_AT]
            value, feature = record[Record.PROBLEM_VALUE], record[Record.PROBLEM_FEATURE]
            return ValueError(f"{operator}: {describe_problem(kind, at, value, feature)}")
        where = (
            f"{operator}: rank {self.rank} of group '{self.group.name}', channel {self.index}, "
            f"call {call} (epoch {record[Record.EPOCH]}), {host.PHASES[record[Record.PHASE]]}"
        )
        if code == host.BROKEN:
            return CommunicationError(f"{where}: ran on a channel that is broken since: {self.agreement.broken}")
        if code == host.TIMEOUT:
            late = self._ranks(record[Record.LATE]) or [record[Record.PEER]]
            return PeerTimeoutError(f"{where}: waited {self.group.timeout_s:g} s; ranks that did not arrive: {late}")
        rejected, bad_value = self._ranks(record[Record.REJECTED]), self._ranks(record[Record.BAD_VALUE])
        peer = [*rejected, *bad_value, record[Record.PEER]][0]
        if code == host.REJECTED and not rejected and bad_value:
            return PeerAbortedError(
                f"{where}: rank {peer} rejected its input: it has a wrong offset or index, which its own error names"
            )
        reason = self.agreement.reason(peer, call)
        if code == host.REJECTED and not self.agreement.disagrees(peer, call):
            return PeerAbortedError(f"{where}: rank {peer} rejected its input or gave up: {reason}")
        mine = self.agreement.reason(self.rank, call)
        return ValueError(f"{where}: ranks disagree: rank {self.rank} has [{mine}], rank {peer} has [{reason}]")

    def _ranks(self, bits: int) -> list[int]:
        return [r for r in range(self.world) if bits >> r & 1]

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _follow_stream(self) -> None:
        """Make the current stream follow the one this channel was last used on."""
        if self.device.type != "cuda" or self._is_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _describe_by_numbers(kind: int, at: int, value: int, feature: int) -> str:
    return f"wrong offset or index {value} at position {at}, feature {feature}"


def triton_channel(
    group: GroupContext, index: int, device: torch.device, abort: Callable[[TritonChannel], None]
) -> TritonChannel:
    channel = group.channel("triton", index, lambda g, i: TritonChannel(g, i, device, abort))
    if channel.device != device:
        raise ValueError(f"channel {index} of group '{group.name}' lives on {channel.device}; got a tensor on {device}")
    return channel
