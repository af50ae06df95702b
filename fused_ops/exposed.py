"""Exposed communication of the fused operators: how long their waits lasted beyond their own compute."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_total_ns = 0


def add_ns(ns: int) -> None:
    global _total_ns
    if ns:
        with _lock:
            _total_ns += ns


def exposed_wait_ms() -> float:
    """Milliseconds that fused operators of this process waited for peers since the last call of this function."""
    global _total_ns
    with _lock:
        total, _total_ns = _total_ns, 0
    return total / 1e6
