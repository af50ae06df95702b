"""Which failure of a run was the first, and on which rank; the others are its consequences."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import fused_ops
from fused_ops.symmetric.segment import host_identity

FAILURE = "failure"
GRACE_S = 2.0


class TerminatedError(Exception):
    """SIGTERM: torchrun ends the ranks that are left when one has failed."""


def introduce(store: dist.Store, rank: int) -> None:
    """Leave word of where this rank runs, so that others can tell when it is gone."""
    store.set(f"process/{rank}", f"{host_identity()} {os.getpid()}")


def first_failure(store: dist.Store, rank: int, world: int, error: BaseException) -> str:
    """What failed first on any rank; this rank's error where nobody has left word before."""
    mine = f"{type(error).__name__} on rank {rank}: {error}"
    if _follows_from_another(error):
        # A rank whose peer went away says so; give the peer a moment to say why.
        with contextlib.suppress(Exception):
            store.wait([FAILURE], timedelta(seconds=GRACE_S / 2))
        ended = _ended_ranks(store, world)
        if ended and not isinstance(error, fused_ops.PeerLostError):  # which has named them
            mine = f"the end of rank {', '.join(map(str, ended))}'s process; {mine}"
    with contextlib.suppress(Exception):
        return store.compare_set(FAILURE, "", mine).decode()
    return mine


def _follows_from_another(error: BaseException) -> bool:
    if isinstance(error, (TerminatedError, fused_ops.CommunicationError)):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error)
        for word in ("Connection closed", "Connection reset", "gloo", "NCCL", "Broken pipe", "pair closure")
    )


def _ended_ranks(store: dist.Store, world: int) -> list[int]:
    """Ranks of this host whose process is gone. The collective library says that a peer is lost, but not which."""
    ended = []
    for rank in range(world):
        with contextlib.suppress(Exception):  # the store may have gone with its rank
            host, pid = store.get(f"process/{rank}").decode().rsplit(" ", 1)
            if host == host_identity() and not _runs(int(pid)):
                ended.append(rank)
    return ended


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
