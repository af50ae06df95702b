"""Ranks agree on a call before any of them sends: the same operator, dtype and shapes, and split sizes that match.

Every call posts a descriptor in this rank's control area. Where the facts are new, or split sizes are known to one side
only, all descriptors of the call are read first. Any disagreement is a ValueError, on every rank that looks, before data
moves; a rank that rejects its own input posts that, so that its peers raise instead of waiting.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fused_ops.compiler import load_host_library
from fused_ops.errors import (
    BackendUnavailableError,
    CommunicationError,
    PeerAbortedError,
    PeerLostError,
    PeerTimeoutError,
)
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment import SharedSegment

OK, TIMEOUT, LOST, REJECTED, BROKEN, INTERRUPTED, BAD_CREDIT, OVERRUN, BAD_TAG = range(9)
PHASES = {1: "agreeing on the call", 2: "waiting for a place to send to", 3: "waiting for data"}
MAX_KNOWN_FACTS = 4096
TAG_MASK = 0x3FFFFFFF  # bit 31 marks a credit posted ahead on CUDA, and all ones is its abort


ROWS_BITS = 40  # of a split number; above them a digest


def split_number(parts: Sequence[int]) -> int:
    """A number for `agree`'s row that says how many rows go from rank to rank, and that they are these many of each part."""
    digest = hashlib.blake2b(repr(tuple(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (ROWS_BITS + 1) << ROWS_BITS | sum(parts)


class Result(ctypes.Structure):
    """How a native call ended; the C++ struct of that name."""

    _fields_ = [
        ("status", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("wait_ns", ctypes.c_int64),
        ("late_count", ctypes.c_int32),
        ("detail_rank", ctypes.c_int32),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    lib = load_host_library()
    lib.fo_channel_create.restype = ctypes.c_void_p
    lib.fo_control_bytes.restype = ctypes.c_int64
    lib.fo_latest_call.restype = ctypes.c_int64
    return lib


def int64_array(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


class Agreement:
    """The control areas of one (group, backend, channel), the count of its calls, and what its peers said of each."""

    def __init__(self, group: GroupContext, kind: str, index: int) -> None:
        self.group, self.index, self.kind = group, index, kind
        self.rank, self.world = group.rank, group.world
        self.call_number = 0
        self.broken: CommunicationError | None = None
        self._known: dict[tuple, tuple[int, bytes]] = {}
        self._raised_in_wait: list[BaseException] = []
        self._posted = False
        self._lib = library()
        self.control, areas, pids = self._map_controls(group, f"{kind}{index}")
        watch = _signal_watch(self._raised_in_wait)
        next(watch)
        callback = ctypes.CFUNCTYPE(ctypes.c_int)(watch.__next__)
        self.handle = ctypes.c_void_p(
            self._lib.fo_channel_create(
                self.rank,
                self.world,
                int64_array([area.address for area in areas]),
                (ctypes.c_int32 * self.world)(*pids),
                callback,
            )
        )
        # Once nothing refers to this object, no call is in progress: the native side can go, and the mappings after it.
        weakref.finalize(self, _destroy, self._lib, self.handle, (areas, callback)).atexit = False
        self._process = os.getpid()
        self._in_use = threading.Lock()
        self.set_timeout(group.timeout_s)

    def _map_controls(self, group: GroupContext, what: str) -> tuple[SharedSegment, list[SharedSegment], list[int]]:
        size = self._lib.fo_control_bytes(group.world)
        mine = SharedSegment.create(size)
        peers = group.exchange(f"{what}/control", {"pid": os.getpid(), "fd": mine.fd})
        areas: list[SharedSegment] = []
        problem = ""
        for r, peer in enumerate(peers):
            try:
                areas.append(mine if r == group.rank else SharedSegment.open(peer["pid"], peer["fd"], size))
            except OSError as error:
                problem = f"rank {group.rank} cannot map rank {r}'s shared memory: {error}"
                break
        # All ranks learn whether all could, so that all take the same way out.
        answers = group.exchange(f"{what}/mapped", {"problem": problem})
        problems = [a["problem"] for a in answers if a["problem"]]
        if problems:
            raise BackendUnavailableError("; ".join(problems))
        return mine, areas, [peer["pid"] for peer in peers]

    def set_timeout(self, seconds: float) -> None:
        self._lib.fo_set_timeout(self.handle, ctypes.c_int64(int(seconds * 1e9)))

    @contextmanager
    def call(self, operator: str) -> Iterator[int]:
        """One call on this channel. An input that this rank rejects inside is a rejection its peers see."""
        if self.broken is not None:
            raise type(self.broken)(f"channel {self.index} of group '{self.group.name}' is broken since: {self.broken}")
        if os.getpid() != self._process:
            raise CommunicationError(f"{operator}: this process was forked from a rank; only the rank itself can call")
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"{operator}: two threads call on channel {self.index} of group '{self.group.name}' at once; "
                "give each its own channel"
            )
        try:
            self.call_number += 1
            self.operator = operator
            self._posted = False
            yield self.call_number
        except (ValueError, PeerAbortedError) as error:
            if not self._posted:
                self._post(str(error).encode(), 0, None, rejected=True)
            raise
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._in_use.release()

    def agree(self, facts: tuple, row: Sequence[int] | None = None) -> tuple[int, list[list[int]]]:
        """Post this call's facts (anything with a stable repr that all ranks must share) and settle the split sizes.

        `row`: this rank's 2 * world numbers (rows it sends to each rank, rows it expects from each; each may be a
        `split_number`), or None where the facts imply them.
        Returns (tag, rows of all ranks, empty where `row` was None). Equal tags mean equal layouts: a credit posted ahead
        under a tag is good for no other.
        """
        known = self._known.get(facts)
        if known is None:
            text = (", ".join(str(f) for f in facts)).encode()
            digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
            known = (int.from_bytes(digest, "little", signed=True), text)
        hash_, text = known
        self._post(text, hash_, row, rejected=False)
        rows: list[list[int]] = []
        if row is not None or facts not in self._known:
            rows = self._gather(hash_, with_rows=row is not None)
            if len(self._known) >= MAX_KNOWN_FACTS:
                self._known.clear()
            self._known[facts] = known
        if row is None:
            return hash_ & TAG_MASK, rows
        layout = hashlib.blake2b(repr((hash_, rows)).encode(), digest_size=4).digest()
        return int.from_bytes(layout, "little") & TAG_MASK, rows

    def _post(self, text: bytes, hash_: int, row: Sequence[int] | None, rejected: bool) -> None:
        self._posted = True
        numbers = int64_array(row) if row is not None else None
        result = Result()
        self._lib.fo_post_descriptor(
            self.handle,
            ctypes.c_int64(self.call_number),
            int(rejected),
            ctypes.c_int64(hash_),
            text,
            numbers,
            ctypes.byref(result),
        )
        self.raise_failure(result)

    def _gather(self, hash_: int, with_rows: bool) -> list[list[int]]:
        text_bytes = self._lib.fo_text_bytes()
        hashes = (ctypes.c_int64 * self.world)()
        texts = ctypes.create_string_buffer(text_bytes * self.world)
        numbers = (ctypes.c_int64 * (2 * self.world * self.world))()
        result = Result()
        self._lib.fo_gather_descriptors(
            self.handle, ctypes.c_int64(self.call_number), hashes, texts, numbers, ctypes.byref(result)
        )
        self.raise_failure(result)
        said = [
            texts.raw[r * text_bytes : (r + 1) * text_bytes].split(b"\0")[0].decode(errors="replace")
            for r in range(self.world)
        ]
        if any(h != hash_ for h in hashes):
            other = next(r for r in range(self.world) if hashes[r] != hash_)
            raise ValueError(
                f"{self.operator}: ranks disagree on call {self.call_number} of channel {self.index}: "
                f"rank {self.rank} has [{said[self.rank]}], rank {other} has [{said[other]}]"
            )
        rows = [list(numbers[r * 2 * self.world : (r + 1) * 2 * self.world]) for r in range(self.world)]
        if with_rows:
            self._check_splits(rows)
        return rows

    def _check_splits(self, rows: list[list[int]]) -> None:
        world = self.world
        for source in range(world):
            for target in range(world):
                sent, expected = rows[source][target], rows[target][world + source]
                if sent == expected:
                    continue
                there, here = sent % (1 << ROWS_BITS), expected % (1 << ROWS_BITS)
                parts = ", divided otherwise" if there == here else ""
                raise ValueError(
                    f"{self.operator}: rank {source} sends {there} rows to rank {target}, which expects {here} from it{parts}"
                )

    def raise_failure(self, result: Result) -> None:
        """Turn a native result into the exception that says what happened; return when it is ok."""
        status, peer = result.status, result.detail_rank
        if status == OK:
            return
        where = (
            f"{self.operator}: rank {self.rank} of group '{self.group.name}', channel {self.index}, call {self.call_number}, "
            f"{PHASES.get(result.phase, '')}"
        )
        if status == INTERRUPTED:
            raise self._raised_in_wait.pop()
        if status == REJECTED:
            raise PeerAbortedError(f"{where}: rank {peer} rejected its input: {self.reason(peer)}")
        if status == BROKEN:
            self.give_up(
                PeerAbortedError(f"{where}: rank {peer} gave up on this channel: {self.reason(peer, broken=True)}")
            )
        elif status == LOST:
            self.give_up(PeerLostError(f"{where}: the process of rank {peer} has ended"))
        elif status == TIMEOUT:
            late = (ctypes.c_int32 * self.world)()
            count = self._lib.fo_late(self.handle, late)
            self.give_up(
                PeerTimeoutError(
                    f"{where}: waited {self.group.timeout_s:g} s; ranks that did not arrive: {sorted(late[:count])}"
                )
            )
        elif status == BAD_TAG:
            theirs = self.reason(peer)
            raise ValueError(
                f"{where}: ranks disagree: rank {self.rank} has [{self.reason(self.rank)}], rank {peer} has [{theirs}]"
            )
        elif status == OVERRUN:
            self.give_up(
                CommunicationError(
                    f"{where}: rank {peer} is more than {self._lib.fo_ring_calls()} calls ahead: ranks issue different calls"
                )
            )
        else:
            self.give_up(
                CommunicationError(
                    f"{where}: rank {peer} posted a credit that does not fit the slice, or memory that cannot be mapped"
                )
            )
        assert self.broken is not None
        raise self.broken

    def disagrees(self, rank: int, call: int) -> bool:
        """Whether that rank made another call than this one, rather than rejecting its input."""
        return bool(self._lib.fo_disagrees(self.handle, rank, ctypes.c_int64(call)))

    def reason(self, rank: int, call: int | None = None, broken: bool = False) -> str:
        """What that rank said of a call (by default the present one), or of why it gave up."""
        text = ctypes.create_string_buffer(self._lib.fo_text_bytes())
        number = self.call_number if call is None else call
        self._lib.fo_reason(self.handle, rank, ctypes.c_int64(number), int(broken), text)
        return text.value.decode(errors="replace")

    def give_up(self, error: BaseException) -> None:
        """No later call can work: say so here and to the peers, who may be waiting for this rank."""
        if self.broken is None:
            message = f"{type(error).__name__}: {error}"
            self.broken = error if isinstance(error, CommunicationError) else CommunicationError(message)
            self._lib.fo_mark_broken(self.handle, message.encode())

    def newest_common_call(self) -> int:
        """The newest call that every rank has begun."""
        return min(self._lib.fo_latest_call(self.handle, r) for r in range(self.world))


def _signal_watch(raised: list[BaseException]) -> Iterator[int]:
    """Native waits ask this about once a second: 1 to give up, since a signal handler (Ctrl-C) raised.

    A generator, because Python runs pending signal handlers where it resumes, which is inside the `try`; on entry to a plain
    function they run before any `try`, and ctypes would drop what they raise.
    """
    answer = 0
    while True:
        try:
            yield answer
            answer = 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
            answer = 1


def _destroy(lib: ctypes.CDLL, handle: ctypes.c_void_p, used_by_it: tuple) -> None:
    lib.fo_channel_destroy(handle)
    del used_by_it
