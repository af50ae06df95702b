"""Exposed communication: how long the fused operators' waits lasted beyond their own compute, and whole unfused exchanges."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_total_ns = 0
_running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # exchanges on GPU streams


def add_ns(ns: int) -> None:
    global _total_ns
    if ns:
        with _lock:
            _total_ns += ns


@contextmanager
def whole(device: torch.device | None = None) -> Iterator[None]:
    """The time inside is exposed as a whole: an exchange that nothing is fused into, its packing included.

    On a GPU it is the time that `device`'s current stream spends there, known once the stream has passed; what a CUDA
    graph replays is not timed.
    """
    if device is None or device.type != "cuda":
        with _host_clock():
            yield
    elif torch.cuda.is_current_stream_capturing():
        yield
    else:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
        with _lock:
            _add_finished()
            _running.append((start, end))


@contextmanager
def _host_clock() -> Iterator[None]:
    global _total_ns
    start = time.perf_counter_ns()
    before = _total_ns
    try:
        yield
    finally:
        with _lock:
            _total_ns = before + time.perf_counter_ns() - start


def _add_finished() -> None:
    """Take in the exchanges that the GPU is done with, without waiting for those that it is not."""
    global _total_ns
    while _running and _running[0][1].query():
        start, end = _running.popleft()
        _total_ns += int(start.elapsed_time(end) * 1e6)


def exposed_wait_ms() -> float:
    """Milliseconds that fused operators of this process waited for peers since the last call of this function.

    Of exchanges on a GPU that are still running, the next call tells.
    """
    global _total_ns
    with _lock:
        _add_finished()
        total, _total_ns = _total_ns, 0
    return total / 1e6
