"""Batches on their way to a step: loaded, and their indices distributed, while the step before computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.dlrm.index_distribution import DistributedIndices, Pending
from trainers import device
from trainers.config import ModelConfig
from trainers.data.batch import Batch, make_batch
from trainers.engines import Engine
from trainers.step_timing import StepTimer


def empty_batch(model: ModelConfig) -> Batch:
    """What a rank contributes when its samples are used up and others' are not."""
    no_ids = [np.zeros((0, 1), np.int64)] * len(model.table_rows)
    return make_batch(np.zeros((0, model.num_dense), np.float32), no_ids, np.zeros(0, np.float32))


class Feed:
    """Runs one batch ahead.

    fetch()   load the next batch; the sizes of its indices leave
    send()    the indices leave
    take()    the batch that was fetched, with its indices here

    Every rank calls them in the same order and equally often. A rank without samples hands out empty batches for ever,
    and `indices.batch_sizes`, which travels with the sizes anyway, tells all ranks in the same step when none is left.
    """

    def __init__(self, batches: Iterator[Batch], engine: Engine, timer: StepTimer, model: ModelConfig) -> None:
        self._batches = device.feed(batches, engine.device)
        self._distribution, self._timer = engine.indices, timer
        self._empty = empty_batch(model).to(engine.device)
        self._next: tuple[Batch, Pending] | None = None

    def fetch(self) -> None:
        with self._timer.part("data"):
            batch = next(self._batches, self._empty)
        with self._timer.part("index_dist"):
            self._next = (batch, self._distribution.start(batch.sparse))

    def send(self) -> None:
        if self._next is not None:
            batch, pending = self._next
            with self._timer.part("index_dist"):
                self._next = (batch, self._distribution.send(pending))

    def take(self) -> tuple[Batch, DistributedIndices]:
        if self._next is None:
            raise RuntimeError("take() before fetch()")
        (batch, pending), self._next = self._next, None
        with self._timer.part("index_dist"):
            return batch, self._distribution.finish(pending)
