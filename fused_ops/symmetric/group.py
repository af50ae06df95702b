"""What is known of a process group: who is in it, on which host, and its channels.

Created on a group's first fused call, which is collective, through the group's own store: its collectives stay unused.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fused_ops.compiler import load_host_library
from fused_ops.errors import BackendUnavailableError, CommunicationError, PeerLostError, PeerTimeoutError
from fused_ops.symmetric.segment import SharedSegment, host_identity

DEFAULT_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 1e9


class GroupContext:
    """One process group as the operators see it. `rank` and `world` are the group's, not the job's."""

    def __init__(self, process_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.name: str = process_group.group_name
        self.rank: int = process_group.rank()
        self.world: int = process_group.size()
        self.timeout_s = timeout_s
        self.link = _links.get(self.name, _links.get(None, "auto"))
        self._store = distributed_c10d._get_process_group_store(process_group)
        # A store may outlive its group: a later group of this name must not read what this one wrote.
        self._generation = self._store.add(f"fused_ops/generation/{self.rank}", 1)
        self._exchanges: Counter[str] = Counter()
        self._channels: dict[tuple[str, int], Any] = {}
        self._facts: dict[tuple[str, int], Any] = {}
        self._making = _Once()
        self.unreachable = self._why_unreachable()

    def _why_unreachable(self) -> str | None:
        """Why no native backend can serve this group, in the same words on every rank; None when one can."""
        native = ""
        try:
            load_host_library()
        except BackendUnavailableError as error:
            native = str(error)
        probe = SharedSegment.create(1)
        mine = {"host": host_identity(), "native": native, "pid": os.getpid(), "fd": probe.fd}
        peers = self.exchange("hello", mine)
        hosts = sorted({peer["host"] for peer in peers})
        if len(hosts) > 1:
            first = [r for r, peer in enumerate(peers) if peer["host"] == peers[0]["host"]]
            return (
                f"group '{self.name}' spans {len(hosts)} hosts (or pid namespaces): only ranks {first} share rank 0's, "
                "and no native backend crosses hosts"
            )
        if any(peer["native"] for peer in peers):
            return next(f"rank {r}: {peer['native']}" for r, peer in enumerate(peers) if peer["native"])
        blocked = ""
        for r, peer in enumerate(peers):
            try:
                if r != self.rank:
                    SharedSegment.open(peer["pid"], peer["fd"], 1)
            except OSError as error:
                blocked = f"rank {self.rank} cannot map the shared memory of rank {r}: {error}"
        answers = self.exchange("reach", {"blocked": blocked})
        return next((answer["blocked"] for answer in answers if answer["blocked"]), None)

    def exchange(self, what: str, mine: dict) -> list[dict]:
        """Every rank's `mine`, in rank order. Collective; bounded; names the ranks that did not arrive."""
        self._exchanges[what] += 1
        prefix = f"fused_ops/{self._generation}/{what}/{self._exchanges[what]}"
        keys = [f"{prefix}/{r}" for r in range(self.world)]
        where = f"setting up group '{self.name}' ({what}): rank {self.rank}"
        try:
            self._store.set(keys[self.rank], json.dumps(mine))
            deadline = time.monotonic() + self.timeout_s
            pause = 0.0005
            while not self._store.check(keys):  # rather than wait(keys), which lets no signal through
                if time.monotonic() > deadline:
                    late = [r for r in range(self.world) if not self._store.check([keys[r]])]
                    raise PeerTimeoutError(f"{where} waited {self.timeout_s:g} s; ranks that did not arrive: {late}")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            return [json.loads(self._store.get(key)) for key in keys]
        except dist.DistError as error:
            lost = f"{where} cannot reach the group's store: the process that serves it has ended"
            raise PeerLostError(lost) from error

    def channel(self, kind: str, index: int, make: Callable[[GroupContext, int], Any]) -> Any:
        """The channel of that backend and index, made (collectively) on first use."""
        if not 0 <= index < 1 << 16:
            raise ValueError(f"channel must lie in [0, 65536), got {index}")
        key = (kind, index)
        if key not in self._channels:
            with self._making(key):
                if key not in self._channels:
                    self._channels[key] = make(self, index)
        return self._channels[key]

    def fact(self, name: str, find: Callable[[GroupContext, int], Any]) -> Any:
        """Something that all ranks agree on once: `find` is collective, and runs on the first question."""
        key = (name, -1)
        if key not in self._facts:
            with self._making(key):
                if key not in self._facts:
                    self._facts[key] = find(self, -1)
        return self._facts[key]

    def close(self) -> None:
        """The group is gone: let its channels go (each refers back to this object)."""
        self._channels.clear()

    def channels(self) -> list[Any]:
        return list(self._channels.values())


class _Once:
    """`with once(key)`: one thread at a time sets `key` up, several keys at once (peers may wait for either of two).

    What failed once stays failed: a second try would be out of step with the peers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}
        self._failed: dict[Any, Exception] = {}

    @contextmanager
    def __call__(self, key: Any) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._failed:
                earlier = self._failed[key]
                raise type(earlier)(f"the set-up failed earlier: {earlier}")
            try:
                yield
            except BaseException as error:
                if isinstance(error, (CommunicationError, BackendUnavailableError, ValueError)):
                    self._failed[key] = error
                else:
                    self._failed[key] = CommunicationError(f"{type(error).__name__}: {error}")
                raise


_contexts: dict[str, tuple[weakref.ref, GroupContext]] = {}
_making = _Once()
_timeouts: dict[str | None, float] = {}
_links: dict[str | None, str] = {}


def group_name(group: dist.ProcessGroup | str | None) -> str:
    """The name that operators take: of a process group, of the default group for None."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError("no process group: call torch.distributed.init_process_group first, or pass `group`")
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group")
    assert group is not None
    return group.group_name


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def context(name: str) -> GroupContext:
    """The context of a group, made (collectively) on first use and again when a group of that name is created anew."""
    try:
        process_group = resolve(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"there is no process group named '{name}' on this rank") from error
    known = _contexts.get(name)
    if known is not None and known[0]() is process_group:
        return known[1]
    with _making(weakref.ref(process_group)):
        known = _contexts.get(name)
        if known is not None and known[0]() is process_group:
            return known[1]
        timeout = _timeouts.get(name, _timeouts.get(None, DEFAULT_TIMEOUT_S))
        made = GroupContext(process_group, timeout)
        _contexts[name] = (weakref.ref(process_group, functools.partial(_forget, name)), made)
        return made


def _forget(name: str, dead: weakref.ref) -> None:
    known = _contexts.get(name)
    if known is not None and known[0] is dead:
        del _contexts[name]
        known[1].close()


def live_contexts() -> list[GroupContext]:
    return [ctx for ref, ctx in list(_contexts.values()) if ref() is not None]


def set_timeout(seconds: float, group: dist.ProcessGroup | str | None = None) -> None:
    """Bound every wait for a peer: of one group, or (group=None) of all, those to come included."""
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise ValueError(f"the timeout must be positive seconds, at most {LONGEST_TIMEOUT_S:g}, got {seconds}")
    name = None if group is None else group_name(group)
    _timeouts[name] = seconds
    for ctx in live_contexts():
        if name in (None, ctx.name):
            ctx.timeout_s = seconds
            for channel in ctx.channels():
                channel.set_timeout(seconds)


def set_link(link: str, group: dist.ProcessGroup | str | None = None) -> None:
    """Which memory GPU ranks reach each other through: "peer", "pinned" (host memory) or "auto" (peer where all devices
    have it). Call it alike on every rank, before the group's first fused call; group=None means every group."""
    if link not in ("auto", "peer", "pinned"):
        raise ValueError(f"link must be 'auto', 'peer' or 'pinned', got {link!r}")
    name = None if group is None else group_name(group)
    used = [ctx.name for ctx in live_contexts() if name in (None, ctx.name) and ctx.link != link and ctx.channels()]
    if used:
        raise ValueError(f"groups {used} are in use with another link: set the link before a group's first fused call")
    _links[name] = link
    for ctx in live_contexts():
        if name in (None, ctx.name):
            ctx.link = link


def check_errors(group: dist.ProcessGroup | str | None = None) -> None:
    """Raise what a device kernel recorded (a peer that did not arrive, a bad index) since the last look.

    Host operators raise at the call; device ones cannot without a synchronisation, so call this at the end of a step
    and before saving anything. It reads pinned host memory and never blocks.
    """
    name = None if group is None else group_name(group)
    for ctx in live_contexts():
        if name in (None, ctx.name):
            for channel in ctx.channels():
                channel.check_errors()


def memory_report() -> list[dict[str, Any]]:
    """Shared memory held by this rank: one row a channel with group, backend, channel, bytes."""
    return [
        {"group": ctx.name, "backend": kind, "channel": index, "bytes": channel.bytes}
        for ctx in live_contexts()
        for (kind, index), channel in list(ctx._channels.items())
    ]
