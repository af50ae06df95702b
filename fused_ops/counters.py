"""What ran: how often each operator ran on each backend, and why that one."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_counts: Counter[tuple[str, str, str]] = Counter()


def count(operator: str, backend: str, reason: str) -> None:
    with _lock:
        _counts[operator, backend, reason] += 1


def counters() -> dict[tuple[str, str, str], int]:
    """{(operator, backend, reason): calls} of this process since the last reset; a backward counts as its own operator."""
    with _lock:
        return dict(_counts)


def reset_counters() -> None:
    with _lock:
        _counts.clear()
