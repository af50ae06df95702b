"""Exposed communication of the fused operators: how long their waits lasted beyond their own compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_total_ns = 0


def add_ns(ns: int) -> None:
    global _total_ns
    if ns:
        with _lock:
            _total_ns += ns


@contextmanager
def whole() -> Iterator[None]:
    """The time inside is exposed as a whole: an exchange that nothing is fused into, its packing included."""
    global _total_ns
    start = time.perf_counter_ns()
    before = _total_ns
    try:
        yield
    finally:
        with _lock:
            _total_ns = before + time.perf_counter_ns() - start


def exposed_wait_ms() -> float:
    """Milliseconds that fused operators of this process waited for peers since the last call of this function."""
    global _total_ns
    with _lock:
        total, _total_ns = _total_ns, 0
    return total / 1e6
