"""A channel of the host backend: agreement, credits, slots, and the output tensors that live in them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fused_ops import exposed
from fused_ops.errors import CommunicationError
from fused_ops.symmetric.agreement import Agreement, Result, int64_array, library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.slots import Slot, SlotPool

MOST_PREDICTIONS = 1024


@dataclass(frozen=True)
class Incoming:
    """Where each rank's slice goes in this rank's output: byte offsets and lengths, by source rank."""

    offsets: tuple[int, ...]
    bytes: tuple[int, ...]
    total: int

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Incoming:
        """Slices one behind the other, in rank order."""
        offsets, at = [], 0
        for length in lengths:
            offsets.append(at)
            at += length
        return cls(tuple(offsets), tuple(lengths), at)

    @classmethod
    def strided(cls, offsets: Sequence[int], total: int) -> Incoming:
        """Every source writes rows of its own columns: it is given the whole output, from its first column on."""
        return cls(tuple(offsets), tuple(total - o if total else 0 for o in offsets), total)


class HostChannel:
    """One lane of a group's shared memory on this host. Made collectively by `GroupContext.channel`."""

    def __init__(self, group: GroupContext, index: int) -> None:
        self.agreement = Agreement(group, "host", index)
        self.rank, self.world = group.rank, group.world
        self.slots = SlotPool(self.agreement.newest_common_call)
        self._posted_ahead: tuple[int, int, Incoming, Slot] | None = None
        self._followed_by: dict[int, tuple[int, Incoming]] = {}  # tag -> the call that came after it last time
        self._previous_tag: int | None = None

    @property
    def bytes(self) -> int:
        return self.slots.bytes + self.agreement.control.size

    @property
    def handle(self) -> ctypes.c_void_p:
        return self.agreement.handle

    def set_timeout(self, seconds: float) -> None:
        self.agreement.set_timeout(seconds)

    def check_errors(self) -> None:
        """Host operators raise at the call; nothing is left to raise later."""

    @contextmanager
    def receive(self, tag: int, incoming: Incoming) -> Iterator[Receipt]:
        """Post this call's credits (unless they were posted ahead), let the caller exchange, then hand out the output."""
        call = self.agreement.call_number
        slot, staged = self._claim(call, tag, incoming)
        receipt = Receipt(slot, staged)
        try:
            yield receipt
        except BaseException:
            slot.quarantined_call = call  # a peer that has not noticed yet may still store into it
            slot.pinned = False
            raise
        self._post_next(call, tag, incoming)
        slot.pinned = False

    def _claim(self, call: int, tag: int, incoming: Incoming) -> tuple[Slot, bool]:
        ahead, self._posted_ahead = self._posted_ahead, None
        if ahead is not None:
            ahead_call, ahead_tag, ahead_incoming, slot = ahead
            if (ahead_call, ahead_tag) == (call, tag):
                if ahead_incoming != incoming:  # a sender may have used the credit: never take a place for another's
                    raise CommunicationError(f"two layouts of channel {self.agreement.index} have one tag, {tag:#x}")
                return slot, False
            # Another call than predicted. A peer that took part in the predicted one (this rank rejected it, or ranks
            # disagree) may be storing on its credit at this moment.
            slot.quarantined_call = ahead_call
            slot.pinned = False
        found = self.slots.take(max(incoming.total, 1))
        staged = found is None
        slot = self.slots.staging(max(incoming.total, 1)) if found is None else found
        self._post(call, tag, incoming, slot)
        return slot, staged

    def _post_next(self, call: int, tag: int, incoming: Incoming) -> None:
        """Post the credit of the next call ahead of use, for the layout that followed this one before."""
        if self._previous_tag is not None:
            if len(self._followed_by) >= MOST_PREDICTIONS:
                self._followed_by.clear()
            self._followed_by[self._previous_tag] = (tag, incoming)
        self._previous_tag = tag
        predicted = self._followed_by.get(tag)
        if predicted is None:
            return
        next_tag, next_incoming = predicted
        slot = self.slots.take(max(next_incoming.total, 1))
        if slot is not None:
            self._post(call + 1, next_tag, next_incoming, slot)
            self._posted_ahead = (call + 1, next_tag, next_incoming, slot)

    def _post(self, call: int, tag: int, incoming: Incoming, slot: Slot) -> None:
        library().fo_post_credits(
            self.handle,
            ctypes.c_int64(call),
            ctypes.c_uint32(tag),
            ctypes.c_int64(slot.identity),
            ctypes.c_int64(slot.segment.fd if slot.segment.fd is not None else -1),
            ctypes.c_int64(slot.size),
            ctypes.c_int64(self.slots.oldest_live),
            int64_array(incoming.offsets),
            int64_array(incoming.bytes),
        )

    def finish(self, result: Result) -> None:
        """Account for the wait of a native call and raise what went wrong in it."""
        exposed.add_ns(result.wait_ns)
        self.agreement.raise_failure(result)

    def set_stress_delay(self, max_us: int, seed: int) -> None:
        """Stress tests: sleep up to that long between a slice's data and its flag."""
        library().fo_set_delay(self.handle, ctypes.c_int64(max_us), ctypes.c_int64(seed))


@dataclass
class Receipt:
    """The place this call's output arrives in."""

    slot: Slot
    staged: bool

    @property
    def address(self) -> int:
        return self.slot.segment.address

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The output, once all slices are in: a view of the slot, or a copy where the slot could not be given away."""
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        if not self.staged:
            return self.slot.tensor(tuple(shape), dtype)
        view = self.slot.tensor(tuple(shape), dtype)
        out = view.clone()
        del view
        return out


def host_channel(group: GroupContext, index: int) -> HostChannel:
    return group.channel("host", index, HostChannel)
