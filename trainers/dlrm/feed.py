"""Batches on their way to a step: loaded, and their indices distributed, while the step before computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.dlrm.index_distribution import DistributedIndices, IndexDistribution, Pending
from trainers import device
from trainers.data.batch import Batch, make_batch
from trainers.dlrm.config import DLRMConfig
from trainers.step_timing import StepTimer


@dataclass
class ClickWork:
    """This rank's samples, and the indices of all ranks' samples for this rank's tables."""

    batch: Batch
    indices: DistributedIndices
    logits: torch.Tensor | None = None  # once the model has run

    @property
    def total(self) -> int:
        return sum(self.indices.batch_sizes)

    samples = total

    def tensors(self) -> dict[str, Any]:
        batch, sparse = self.batch, self.batch.sparse
        logits = None if self.logits is None else self.logits.detach()
        parts: dict[str, Any] = {"dense": batch.dense, "labels": batch.labels, "logits": logits}
        return parts | {"keys": sparse.keys(), "values": sparse.values(), "lengths": sparse.lengths()}


def empty_batch(model: DLRMConfig) -> Batch:
    """What a rank contributes when its samples are used up and others' are not."""
    no_ids = [np.zeros((0, 1), np.int64)] * len(model.table_rows)
    return make_batch(np.zeros((0, model.num_dense), np.float32), no_ids, np.zeros(0, np.float32))


class ClickFeed:
    """See `trainers.engine.Feed`. What leaves first are the sizes of a batch's indices, then the indices.

    A rank without samples hands out empty batches for ever, and `indices.batch_sizes`, which travels with the sizes anyway,
    tells all ranks in the same step when none is left.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        distribution: IndexDistribution,
        on: torch.device,
        timer: StepTimer,
        model: DLRMConfig,
    ) -> None:
        self._batches = device.feed(batches, on)
        self._distribution, self._timer = distribution, timer
        self._empty = empty_batch(model).to(on)
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

    def take(self) -> ClickWork:
        if self._next is None:
            raise RuntimeError("take() before fetch()")
        (batch, pending), self._next = self._next, None
        with self._timer.part("index_dist"):
            return ClickWork(batch, self._distribution.finish(pending))
