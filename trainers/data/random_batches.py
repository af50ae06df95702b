"""Batches of random ids, for measuring: nothing can be learnt from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from trainers.data.batch import Batch, make_batch
from trainers.data.errors import DataError
from trainers.data.generate import zipf
from trainers.data.layout import SPLITS
from trainers.data.order import SampleOrder, rank_range
from trainers.data.prefetch import Prefetch

_DRAWS_A_COUNT = 4  # 64-bit numbers that one count of Philox gives


class RandomBatches:
    """This rank's parts of global batches of random samples; every step has its own.

    Ids are uniform over each table's rows, or with `zipf_exponent` > 0 Zipf distributed with low ids the frequent ones;
    a feature has `multi_hot_sizes[i]` of them. Dense values are standard normal, labels fair coins. Sample i of step s
    depends on seed, split, s and i alone, so a global batch is the same for any `world`. `num_samples` None: endless.
    """

    def __init__(
        self,
        table_rows: list[int],
        batch_size: int,
        *,
        num_dense: int = 13,
        multi_hot_sizes: list[int] | None = None,
        zipf_exponent: float = 0.0,
        split: str = "train",
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        start_step: int = 0,
        num_samples: int | None = None,
    ):
        hot_sizes = multi_hot_sizes or [1] * len(table_rows)
        if len(hot_sizes) != len(table_rows) or min(hot_sizes) < 0:
            raise DataError(
                f"multi_hot_sizes {hot_sizes}: one number of ids, 0 or more, for each of {len(table_rows)} tables"
            )
        if zipf_exponent < 0 or zipf_exponent == 1:
            raise DataError(f"zipf_exponent {zipf_exponent}: allowed are 0 (uniform) and above, but not exactly 1")
        self.table_rows, self.hot_sizes, self.num_dense, self.zipf_exponent = (
            table_rows,
            hot_sizes,
            num_dense,
            zipf_exponent,
        )
        self.rank, self.world, self.start_step = rank, world, start_step
        self._stream = (seed, SPLITS.index(split))
        self._batch_size = batch_size
        self._order = None if num_samples is None else SampleOrder(num_samples, batch_size, seed, shuffle=False)

    def max_ids(self) -> list[int]:
        return [rows - 1 for rows in self.table_rows]

    def __len__(self) -> int:
        """Steps from `start_step` to the end."""
        if self._order is None:
            raise TypeError("endless batches have no length")
        return max(self._order.steps_per_epoch - self.start_step, 0)

    def __iter__(self) -> Iterator[Batch]:
        return Prefetch(self._batches())

    def _batches(self) -> Iterator[Batch]:
        step = self.start_step
        while self._order is None or step < self._order.steps_per_epoch:
            yield self.read(step)
            step += 1

    def read(self, step: int) -> Batch:
        """This rank's part of the global batch of `step`."""
        size = self._batch_size
        if self._order is not None:
            _, start, stop = self._order.batch(step)
            size = stop - start
        samples = rank_range(size, self.rank, self.world)
        dense = torch.special.ndtri(
            torch.from_numpy(np.maximum(self._uniform(step, 0, samples, self.num_dense), 2.0**-54))
        )
        labels = self._uniform(step, 1, samples, 1)[:, 0] < 0.5
        ids = []
        for feature, (rows, hot) in enumerate(zip(self.table_rows, self.hot_sizes, strict=True)):
            uniform = self._uniform(step, 2 + feature, samples, hot)
            if self.zipf_exponent:
                ids.append(zipf(uniform, rows, self.zipf_exponent))
            else:
                ids.append((uniform * rows).astype(np.int64))
        return make_batch(dense.numpy(), ids, labels)

    def _uniform(self, step: int, stream: int, samples: tuple[int, int], width: int) -> np.ndarray:
        """[stop - start, width] numbers in [0, 1): rows start .. stop - 1 of a matrix that the stream defines."""
        start, stop = (position * width for position in samples)
        philox = np.random.Philox(np.random.SeedSequence((*self._stream, step, stream)))
        philox.advance(start // _DRAWS_A_COUNT)
        skip = start % _DRAWS_A_COUNT
        return (
            np.random.Generator(philox).random(skip + stop - start)[skip:].reshape(-1, width)
            if width
            else np.zeros((samples[1] - samples[0], 0))
        )
