"""Which samples make up the global batch of a step: a function of seed and step alone, whatever the number of ranks."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BLOCK = 1024  # rows that lie together on disk
WINDOW_BLOCKS = 64  # blocks, from anywhere in the split, whose rows are mixed


def rank_range(samples: int, rank: int, world: int) -> tuple[int, int]:
    """The part of a global batch of `samples` that is `rank`'s: start and stop. The first ranks take one more."""
    share, more = divmod(samples, world)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


class SampleOrder:
    """An order of `samples` rows, drawn anew each epoch.

    Shuffled means: blocks of 1024 neighbouring rows are permuted, and then the rows of each window of 64 blocks. A
    window's rows are used by consecutive steps, so that a memory map reads each page once while it is wanted; any
    position is found without replaying those before it.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, shuffle: bool):
        self.samples, self.batch_size, self.seed, self.shuffle = samples, batch_size, seed, shuffle
        self.steps_per_epoch = -(-samples // batch_size)
        self._blocks = lru_cache(2)(self._draw_blocks)
        self._window = lru_cache(4)(self._draw_window)

    def batch(self, step: int) -> tuple[int, int, int]:
        """Epoch, first position and end position in that epoch's order, of the global batch of `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return epoch, start, min(start + self.batch_size, self.samples)

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """int64 row numbers at positions start .. stop - 1 of an epoch."""
        if not self.shuffle:
            return np.arange(start, stop)
        window_rows = BLOCK * WINDOW_BLOCKS
        parts = [np.empty(0, np.int64)]
        for window in range(start // window_rows, -(-stop // window_rows) if stop > start else 0):
            first = window * window_rows
            parts.append(self._window(epoch, window)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def _draw_blocks(self, epoch: int) -> np.ndarray:
        # The last, shorter block keeps its place, so that every window but the last is full.
        whole = self.samples // BLOCK
        blocks = np.random.default_rng([self.seed, epoch]).permutation(whole)
        return np.append(blocks, whole) if self.samples % BLOCK else blocks

    def _draw_window(self, epoch: int, window: int) -> np.ndarray:
        blocks = self._blocks(epoch)[window * WINDOW_BLOCKS : (window + 1) * WINDOW_BLOCKS]
        rows = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return np.random.default_rng([self.seed, epoch, window]).permutation(rows[rows < self.samples])
