import os
import subprocess
import sys

import torch.distributed as dist

import fused_ops
from trainers import failures
from trainers.failures import TerminatedError, first_failure, introduce


def _store_with_a_dead_rank_1(monkeypatch):
    """Rank 0 runs, rank 1 has ended, rank 2 is on another host, rank 3 never got as far."""
    monkeypatch.setattr(failures, "GRACE_S", 0.02)
    store = dist.HashStore()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    introduce(store, 0)
    store.set("process/1", f"{failures.host_identity()} {dead.pid}")
    store.set("process/2", f"elsewhere {dead.pid}")
    return store


def test_a_lost_connection_names_the_rank_that_has_ended(monkeypatch):
    store = _store_with_a_dead_rank_1(monkeypatch)
    assert first_failure(store, 0, 3, RuntimeError("[gloo] Connection reset by peer")) == (
        "the end of rank 1's process; RuntimeError on rank 0: [gloo] Connection reset by peer"
    )
    assert first_failure(store, 2, 3, ValueError("later")).startswith("the end of rank 1's process")


def test_what_is_no_consequence_stands_alone(monkeypatch):
    store = _store_with_a_dead_rank_1(monkeypatch)
    assert first_failure(store, 0, 3, ValueError("bad index")) == "ValueError on rank 0: bad index"
    assert first_failure(store, 2, 3, TerminatedError("the launcher")) == "ValueError on rank 0: bad index"


def test_a_lost_peer_is_named_once(monkeypatch):
    store = _store_with_a_dead_rank_1(monkeypatch)
    assert first_failure(store, 0, 3, fused_ops.PeerLostError("rank 1 has ended")) == (
        "PeerLostError on rank 0: rank 1 has ended"
    )


def test_a_zombie_does_not_run():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert not failures._runs(child.pid)
    assert failures._runs(os.getpid())
    child.wait()
