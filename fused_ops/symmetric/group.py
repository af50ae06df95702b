"""What is known of a process group: who is in it, on which host, and its channels.

Created on a group's first fused call, which is collective, through the group's own store (no traffic on its collectives).
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fused_ops.compiler import load_host_library
from fused_ops.errors import BackendUnavailableError, PeerTimeoutError
from fused_ops.symmetric.segment import host_identity

DEFAULT_TIMEOUT_S = 600.0


class GroupContext:
    """One process group as the operators see it. `rank` and `world` are the group's, not the job's."""

    def __init__(self, process_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.name: str = process_group.group_name
        self.rank: int = process_group.rank()
        self.world: int = process_group.size()
        self.timeout_s = timeout_s
        self.link = _links.get(self.name, _links.get(None, "auto"))
        self._store = distributed_c10d._get_process_group_store(process_group)
        self._exchanges = 0
        self._channels: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()
        self.unreachable = self._why_unreachable()

    def _why_unreachable(self) -> str | None:
        """Why no native backend can serve this group, in the same words on every rank; None when one can."""
        native = ""
        try:
            load_host_library()
        except BackendUnavailableError as error:
            native = str(error)
        peers = self.exchange("hello", {"host": host_identity(), "native": native})
        hosts = sorted({peer["host"] for peer in peers})
        if len(hosts) > 1:
            first = [r for r, peer in enumerate(peers) if peer["host"] == peers[0]["host"]]
            return (
                f"group '{self.name}' spans {len(hosts)} hosts (or pid namespaces): only ranks {first} share rank 0's, "
                "and no native backend crosses hosts"
            )
        return next((f"rank {r}: {peer['native']}" for r, peer in enumerate(peers) if peer["native"]), None)

    def exchange(self, what: str, mine: dict) -> list[dict]:
        """Every rank's `mine`, in rank order. Collective; bounded; names the ranks that did not arrive."""
        self._exchanges += 1
        prefix = f"fused_ops/{self._exchanges}/{what}"
        self._store.set(f"{prefix}/{self.rank}", json.dumps(mine))
        keys = [f"{prefix}/{r}" for r in range(self.world)]
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except (RuntimeError, dist.DistStoreError) as error:
            late = [r for r in range(self.world) if not self._store.check([keys[r]])]
            raise PeerTimeoutError(
                f"setting up group '{self.name}' ({what}): rank {self.rank} waited {self.timeout_s:g} s; "
                f"ranks that did not arrive: {late}"
            ) from error
        return [json.loads(self._store.get(key)) for key in keys]

    def channel(self, kind: str, index: int, make: Callable[[GroupContext, int], Any]) -> Any:
        """The channel of that backend and index, made (collectively) on first use."""
        if not 0 <= index < 1 << 16:
            raise ValueError(f"channel must lie in [0, 65536), got {index}")
        with self._lock:
            key = (kind, index)
            if key not in self._channels:
                self._channels[key] = make(self, index)
            return self._channels[key]

    def channels(self) -> list[Any]:
        return list(self._channels.values())


_contexts: dict[str, tuple[weakref.ref, GroupContext]] = {}
_lock = threading.Lock()
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


def context(name: str) -> GroupContext:
    """The context of a group, made (collectively) on first use and again when a group of that name is created anew."""
    try:
        process_group = distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"there is no process group named '{name}' on this rank") from error
    with _lock:
        known = _contexts.get(name)
        if known is not None and known[0]() is process_group:
            return known[1]
        timeout = _timeouts.get(name, _timeouts.get(None, DEFAULT_TIMEOUT_S))
        made = GroupContext(process_group, timeout)
        _contexts[name] = (weakref.ref(process_group), made)
        return made


def live_contexts() -> list[GroupContext]:
    with _lock:
        return [ctx for ref, ctx in _contexts.values() if ref() is not None]


def set_timeout(seconds: float, group: dist.ProcessGroup | str | None = None) -> None:
    """Bound every wait for a peer: of one group, or (group=None) of all, those to come included."""
    if not seconds > 0:
        raise ValueError(f"the timeout must be positive seconds, got {seconds}")
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

    Host operators raise at the call; device ones cannot without a synchronisation, so call this at the end of a step and
    before saving anything. It reads pinned host memory and never blocks.
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
        for (kind, index), channel in ctx._channels.items()
    ]
