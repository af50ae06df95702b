"""Batches of text on their way to a step: loaded, and their targets counted over replicas, while the step before computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainers import device
from trainers.data.text.batch import TextBatch, make_text_batch
from trainers.step_timing import StepTimer


@dataclass
class TextWork:
    """This replica's samples. total: targets of all replicas that are not ignored."""

    batch: TextBatch
    total: int
    samples: int

    def tensors(self) -> dict[str, Any]:
        batch = self.batch
        return {
            "tokens": batch.tokens,
            "targets": batch.targets,
            "positions": batch.positions,
            "documents": batch.documents,
        }


class TextFeed:
    """See `trainers.engine.Feed`. What leaves first is the number of targets and samples; nothing follows.

    data: the group of the replicas; None where there is one.
    """

    def __init__(
        self,
        batches: Iterator[TextBatch],
        length: int,
        data: dist.ProcessGroup | None,
        on: torch.device,
        timer: StepTimer,
    ) -> None:
        self._batches, self._data, self._timer = device.feed(batches, on), data, timer
        self._empty = make_text_batch([], length).to(on)
        self._next: tuple[TextBatch, torch.Tensor, dist.Work | None] | None = None

    def fetch(self) -> None:
        with self._timer.part("data"):
            batch = next(self._batches, self._empty)
        with self._timer.part("index_dist"):
            counts = torch.stack([batch.num_targets(), batch.num_targets().new_tensor(len(batch))])
            arrived = None if self._data is None else dist.all_reduce(counts, group=self._data, async_op=True)
        self._next = (batch, counts, arrived)

    def send(self) -> None:
        """Nothing is left to send."""

    def take(self) -> TextWork:
        if self._next is None:
            raise RuntimeError("take() before fetch()")
        (batch, counts, arrived), self._next = self._next, None
        with self._timer.part("index_dist"):
            if arrived is not None:
                arrived.wait()
            total, samples = counts.tolist()
        return TextWork(batch, total, samples)
