"""Iterate ahead in a thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_END = object()


class Prefetch(Generic[T]):
    """Yield what `source` yields, made up to `ahead` items early in a background thread.

    An exception of the source is raised where its item would have come. `close` (also on collection, and at the end)
    stops the thread and waits for it.
    """

    def __init__(self, source: Iterator[T], ahead: int = 2):
        self._queue: queue.Queue = queue.Queue(ahead)
        stop = threading.Event()
        thread = threading.Thread(target=_fill, args=(source, self._queue, stop), name="prefetch", daemon=True)
        # Also at exit: a daemon thread inside torch while the interpreter goes down can abort the process.
        self._close = weakref.finalize(self, _end, stop, thread)
        thread.start()

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        if not self._close.alive:
            raise StopIteration
        item, error = self._queue.get()
        if error is None and item is not _END:
            return item
        self.close()
        raise StopIteration if error is None else error

    def close(self) -> None:
        self._close()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if threading.current_thread() is not thread:
        thread.join()


def _fill(source: Iterator, items: queue.Queue, stop: threading.Event) -> None:
    # A function, not a method: a thread that held the Prefetch would keep it from being collected.
    def put(entry: tuple) -> None:
        while not stop.is_set():
            try:
                return items.put(entry, timeout=0.1)
            except queue.Full:
                continue

    try:
        for item in source:
            put((item, None))
            if stop.is_set():
                return
        put((_END, None))
    except BaseException as error:  # it belongs to whoever iterates
        put((None, error))
