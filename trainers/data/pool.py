"""Work spread over threads with its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[tuple[T, R]]:
    """(item, function(item)) in the order of `items`, at most `ahead` of them in work or waiting."""
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) >= ahead:
                first, future = waiting.popleft()
                yield first, future.result()
                del first, future
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
