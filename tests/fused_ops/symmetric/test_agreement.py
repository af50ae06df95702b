"""Bounded waits: a stopped peer, a dead one, Ctrl-C, a fork; each ends in its own error, in time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from tests.ranks import run_ranks


def call(**options):
    return fused_ops.all_to_all(torch.zeros(dist.get_world_size(), 2), comm="host", **options)


def call_twice():
    """Where a peer gave up on a call after its own part was done: the next one, at the latest, must say so."""
    call()
    call()


def stopped_peer():
    rank = dist.get_rank()
    call()
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    fused_ops.set_timeout(1.0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 wakes it
        with pytest.raises(fused_ops.PeerAbortedError):
            call_twice()
        return
    time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(fused_ops.PeerTimeoutError, match=r"all_to_all: rank \d of group .*did not arrive: \[2\]"):
        call()
    assert 0.9 < time.monotonic() - start < 5
    start = time.monotonic()
    with pytest.raises(fused_ops.PeerTimeoutError, match="broken since"):
        call()
    assert time.monotonic() - start < 0.5
    if rank == 0:
        time.sleep(1.5)  # rank 1's own bound
        os.kill(pids[2], signal.SIGCONT)


def test_a_stopped_peer_is_named_within_the_bound():
    run_ranks(3, stopped_peer)


def killed_peer():
    rank = dist.get_rank()
    call()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(fused_ops.PeerLostError, match="the process of rank 1 has ended"):
        call()
    assert time.monotonic() - start < 5


def test_a_killed_peer_is_named_at_once():
    run_ranks(3, killed_peer, may_die={1})


class StopError(Exception):
    pass


def interrupted(handler: str):
    rank = dist.get_rank()
    call()
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)
        with pytest.raises(fused_ops.PeerAbortedError, match="gave up on this channel"):
            call_twice()
        return
    if handler == "custom":
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(StopError("time is up")))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        expected: type[BaseException] = StopError
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        expected = KeyboardInterrupt
    start = time.monotonic()
    with pytest.raises(expected):
        call()
    assert time.monotonic() - start < 2.4
    with pytest.raises(fused_ops.CommunicationError, match="broken since"):
        call()
    time.sleep(1.5)


@pytest.mark.parametrize("handler", ["ctrl-c", "custom"])
def test_signal_handlers_that_raise_end_a_wait(handler):
    run_ranks(2, interrupted, handler)


def handlers_that_return():
    rank, seen = dist.get_rank(), []
    call()
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)
        call()
        return []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.7)
    call()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return seen


def test_signal_handlers_run_during_a_wait_which_goes_on():
    seen, _ = run_ranks(2, handlers_that_return)
    assert len(seen) >= 2


def forked():
    call()
    child = os.fork()
    if child == 0:
        try:
            call()
        except fused_ops.CommunicationError as error:
            os._exit(0 if "forked from a rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    call()


def test_a_forked_child_may_not_call():
    run_ranks(2, forked)


def slow_reader():
    """A rank that rejects its input again and again must not lap the peers that have yet to read why."""
    rank = dist.get_rank()
    call()
    if rank == 1:
        time.sleep(0.5)
    for _ in range(200):
        with pytest.raises(ValueError if rank == 0 else fused_ops.PeerAbortedError, match="divide evenly"):
            fused_ops.all_to_all(torch.zeros(2 + (rank == 0)), comm="host")
    call()


def test_rejections_do_not_lap_a_slow_peer():
    run_ranks(2, slow_reader)


def early_leaver():
    """A peer that has done its part and left is not lost: its data is here."""
    rank = dist.get_rank()
    for _ in range(50):
        output = fused_ops.all_to_all(torch.full((2,), float(rank)), comm="host")
    if rank == 1:
        os._exit(0)
    assert output.tolist() == [0.0, 1.0]
    with pytest.raises(fused_ops.PeerLostError):
        call()


def test_a_peer_that_leaves_after_its_last_call():
    run_ranks(2, early_leaver, may_die={1})


def spoiled_by_a_third():
    """Rank 2 spoils a call. Rank 0 comes to it late, when rank 1 has noticed, and has gone on without a trace of it."""
    rank = dist.get_rank()
    fused_ops.set_timeout(8)
    for _ in range(3):
        call()
    for turn in range(40):
        dist.barrier()
        if rank == 0:
            time.sleep(0.01)
        rejects = rank == 2 and turn % 2 == 0
        input = torch.zeros(3 + rejects, 2 + (rank == 2 and turn % 2 == 1))
        kind = ValueError if rejects or turn % 2 else fused_ops.PeerAbortedError
        with pytest.raises(kind, match="divide evenly" if turn % 2 == 0 else "disagree"):
            fused_ops.all_to_all(input, comm="host")
        call()


def test_a_call_that_one_rank_spoils_ends_on_ranks_that_wait_for_another():
    run_ranks(3, spoiled_by_a_third)
