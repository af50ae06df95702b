"""From 32-bit category values to ids: counting with bounded memory, choosing which values get a row, and looking up.

Ids are 1, 2, ... by descending count, ties by ascending value; id 0 is missing, rare or unseen. So a map depends on the
multiset of values alone, not on the order or the blocks in which they were read.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Distinct values, ascending, and how often each occurred."""

    values: np.ndarray  # uint32 [k]
    counts: np.ndarray  # int64 [k]


class CategoryCounter:
    """Counts of one column's values. Holds about `limit` distinct values in memory (40 bytes each while merging); when
    there are more, sorted runs go to files in `directory`, and `merged` joins them a value range at a time."""

    def __init__(self, directory: Path, limit: int = 1 << 22):
        self._directory = directory
        self._limit = limit
        self._runs: list[Run] = []  # each more than twice as long as the next
        self._spilled: list[Run] = []
        self._files: list[mmap.mmap] = []

    def add(self, values: np.ndarray) -> None:
        """Count `values`, uint32 [n]."""
        if not len(values):
            return
        distinct, counts = np.unique(values, return_counts=True)
        self._runs.append(Run(distinct, counts.astype(np.int64)))
        while len(self._runs) > 1 and len(self._runs[-2].values) <= 2 * len(self._runs[-1].values):
            self._runs[-2:] = [merge(self._runs[-2:])]
        if sum(len(run.values) for run in self._runs) > self._limit:
            self._runs = [merge(self._runs)]
            if len(self._runs[0].values) > self._limit:
                self._spilled.append(self._spill(self._runs.pop()))

    def merged(self) -> Iterator[Run]:
        """All values with their counts, ascending over the runs yielded, each of at most about `limit` values."""
        for run in merge_ranges([*self._spilled, *self._runs], 0, 1 << 32, self._limit):
            yield run
            for file in self._files:
                file.madvise(mmap.MADV_DONTNEED)  # what was read leaves resident memory

    def _spill(self, run: Run) -> Run:
        # An unnamed file: it is gone with this process, however that ends.
        columns = []
        for column in run:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                column.tofile(file)
                file.flush()
                self._files.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            columns.append(np.frombuffer(self._files[-1], column.dtype))
        return Run(*columns)


def merge(runs: list[Run]) -> Run:
    """One run of what several hold."""
    if len(runs) == 1:
        return runs[0]
    values = np.concatenate([run.values for run in runs])
    counts = np.concatenate([run.counts for run in runs])
    order = np.argsort(values, kind="stable")  # the runs are sorted, so this is a merge
    values, counts = values[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return Run(values[first], np.add.reduceat(counts, first))


def merge_ranges(runs: list[Run], low: int, high: int, limit: int) -> Iterator[Run]:
    """Merge the values in [low, high), halving the range until what lies in it is at most `limit` entries."""
    parts = []
    for run in runs:
        # A bound as uint32: a Python int would make searchsorted convert the whole run to int64.
        start = run.values.searchsorted(np.uint32(low))
        stop = run.values.searchsorted(np.uint32(high - 1), side="right")
        if start < stop:
            parts.append(Run(run.values[start:stop], run.counts[start:stop]))
    if not parts:
        return
    if sum(len(part.values) for part in parts) > limit and high - low > 1:
        middle = (low + high) // 2
        yield from merge_ranges(parts, low, middle, limit)
        yield from merge_ranges(parts, middle, high, limit)
    else:
        yield merge(parts)


class CategoryMap(NamedTuple):
    """Which id a value has."""

    values: np.ndarray  # uint32 [k], ascending
    ids: np.ndarray  # int32 [k], a permutation of 1 .. k

    @property
    def rows(self) -> int:
        return len(self.values) + 1

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """int32 [n] ids of uint32 [n] `values`; 0 for those the map does not know."""
        if not len(self.values):
            return np.zeros(len(values), np.int32)
        # Sorted queries walk a large map through the cache: 4 times faster than in the order of the file.
        distinct, inverse = np.unique(values, return_inverse=True)
        at = np.minimum(self.values.searchsorted(distinct), len(self.values) - 1)
        return np.where(self.values[at] == distinct, self.ids[at], np.int32(0))[inverse]


def build_map(counter: CategoryCounter, min_count: int, max_rows: int) -> CategoryMap:
    """Give ids to the values seen at least `min_count` times, the most frequent first, as far as `max_rows` - 1 go."""
    frequencies: dict[int, int] = {}  # count -> how many values have it
    for run in counter.merged():
        for count, number in zip(*(a.tolist() for a in np.unique(run.counts, return_counts=True)), strict=True):
            frequencies[count] = frequencies.get(count, 0) + number
    room = max_rows - 1
    lowest = partial = 0  # keep all values with more than `lowest`, and `partial` values with exactly that
    for count in sorted((c for c in frequencies if c >= min_count), reverse=True):
        lowest, partial = count, min(frequencies[count], room)
        room -= partial
        if not room:
            break
    values, counts = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
    for run in counter.merged() if partial else ():
        keep = run.counts > lowest
        ties = np.flatnonzero(run.counts == lowest)[:partial]
        partial -= len(ties)
        keep[ties] = True
        values.append(run.values[keep])
        counts.append(run.counts[keep])
    kept, frequency = np.concatenate(values), np.concatenate(counts)
    ids = np.empty(len(kept), np.int32)
    ids[np.argsort(-frequency, kind="stable")] = np.arange(1, len(kept) + 1, dtype=np.int32)
    return CategoryMap(kept, ids)


class CategoryHash(NamedTuple):
    """Ids without a map: 1 + value mod (rows - 1). Criteo's values are hashes already."""

    rows: int

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """int32 [n] ids, 1 .. rows - 1, of uint32 [n] `values`."""
        return (values % np.uint32(self.rows - 1)).astype(np.int32) + np.int32(1)
