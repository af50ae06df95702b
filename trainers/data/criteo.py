"""Batches of a prepared Criteo directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainers.data.arrays import Dataset
from trainers.data.batch import Batch, make_batch
from trainers.data.errors import DataError
from trainers.data.layout import NUM_DENSE, NUM_SPARSE, SPLITS
from trainers.data.order import SampleOrder, rank_range
from trainers.data.prefetch import Prefetch

MOST_NAMED = 3


class CriteoBatches:
    """This rank's parts of the global batches of a split, in steps that are the same for every rank.

    The global batch of step s does not depend on `world`; rank r takes its r-th part, the first ranks one sample more,
    so a part may be empty. The last batch of an epoch is smaller if `batch_size` does not divide the split; every rank
    yields it and all end after the same step. Iterating always begins at `start_step`, at no cost; a background thread
    reads ahead.

    `table_rows` given: an id outside its table is a DataError naming file, feature and id. None: ids are not checked.
    `epochs` None: endless.
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        batch_size: int,
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        start_step: int = 0,
        epochs: int | None = None,
        multi_hot: bool = False,
        table_rows: list[int] | None = None,
    ):
        if split not in SPLITS:
            raise DataError(f"split {split!r}, allowed are {', '.join(SPLITS)}")
        if batch_size < 1 or not 0 <= rank < world or start_step < 0:
            raise DataError(
                f"batch_size {batch_size}, rank {rank}, world {world}, start_step {start_step}: allowed are a batch of "
                "1 or more, a rank below world, and a step of 0 or more"
            )
        if table_rows is not None and len(table_rows) != NUM_SPARSE:
            raise DataError(f"{len(table_rows)} tables, Criteo data has {NUM_SPARSE} categorical features")
        self.data = Dataset(Path(path), multi_hot)
        self.split, self.rank, self.world, self.start_step = split, rank, world, start_step
        self._ranges = self.data.splits[split]
        self._ends = np.cumsum([r.stop - r.start for r in self._ranges])
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        if not self.num_samples:
            raise DataError(f"{path}: split {split} has no samples ({self.data.split_samples()})")
        self.order = SampleOrder(self.num_samples, batch_size, seed, shuffle)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.end_step = None if epochs is None else epochs * self.steps_per_epoch
        self._limits = None if table_rows is None else np.array(table_rows, np.int64)
        if self._limits is not None and (largest := self.max_ids()) is not None:
            self._check_limits(np.array(largest), f"{path}/meta.json: max_ids")

    def max_ids(self) -> list[int] | None:
        """The largest id of each feature in the whole directory, from meta.json; None where it is not known."""
        # meta.json describes the single-hot arrays.
        return None if self.data.meta is None or self.data.days[0].multi_hot is not None else self.data.meta.max_ids

    def __len__(self) -> int:
        """Steps from `start_step` to the end."""
        if self.end_step is None:
            raise TypeError("endless batches have no length")
        return max(self.end_step - self.start_step, 0)

    def __iter__(self) -> Iterator[Batch]:
        return Prefetch(self._batches())

    def _batches(self) -> Iterator[Batch]:
        step = self.start_step
        while self.end_step is None or step < self.end_step:
            yield self.read(step)
            step += 1

    def read(self, step: int) -> Batch:
        """This rank's part of the global batch of `step`."""
        epoch, start, stop = self.order.batch(step)
        low, high = rank_range(stop - start, self.rank, self.world)
        rows = self.order.rows(epoch, start + low, start + high)
        # Read in the order of the file, deliver in the order of the batch.
        order = np.argsort(rows, kind="stable")
        dense = np.empty((len(rows), NUM_DENSE), np.float32)
        labels = np.empty(len(rows), np.float32)
        ids = [np.empty((len(rows), hot), np.int64) for hot in self.data.hot_sizes]
        which = self._ends.searchsorted(rows[order], side="right")
        for number in np.unique(which):
            span = self._ranges[number]
            day = self.data.days[span.day]
            at = order[which == number]
            local = rows[at] - (self._ends[number] - span.stop)
            dense[at] = day.dense[local]
            labels[at] = day.labels[local, 0]
            for feature, (target, values) in enumerate(zip(ids, day.ids(local), strict=True)):
                target[at] = values
                self._check_ids(values, feature, day.sparse_path)
        return make_batch(dense, ids, labels)

    def _check_ids(self, values: np.ndarray, feature: int, path: Path) -> None:
        if self._limits is None or not values.size:
            return
        limit = self._limits[feature]
        if (largest := values.max()) >= limit or (smallest := values.min()) < 0:
            wrong = largest if largest >= limit else smallest
            raise DataError(
                f"{path}: feature cat_{feature} has id {wrong}, allowed are 0 .. {limit - 1} (its table's rows)"
            )

    def _check_limits(self, largest: np.ndarray, where: str) -> None:
        wrong = np.flatnonzero(largest >= self._limits)
        if len(wrong):
            first = wrong[:MOST_NAMED]
            text = ", ".join(f"cat_{i} has id {largest[i]} but {self._limits[i]} rows" for i in first)  # type: ignore[index]
            text += f" and {len(wrong) - len(first)} features more" if len(wrong) > len(first) else ""
            raise DataError(f"{where}: {text}; give the model more rows, or prepare with --max-rows or --hash-rows")
