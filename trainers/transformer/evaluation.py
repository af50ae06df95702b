"""Loss and perplexity over every token of an evaluation, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainers.engine import Replica
from trainers.transformer.feed import TextWork


class TextEvaluation:
    """See `trainers.engine.Evaluation`. `loss`: the summed cross-entropy of this replica's targets, in nats."""

    def __init__(self, loss: Callable[[TextWork], torch.Tensor], replica: Replica, device: torch.device) -> None:
        self._loss, self._leads = loss, dist.get_rank() in replica.leaders
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._tokens = self._samples = 0

    def add(self, work: TextWork) -> None:
        self._sum += self._loss(work).double()
        self._tokens += work.total
        self._samples += work.samples

    def event(self, step: int) -> dict[str, Any]:
        """The record, on every rank."""
        total = self._sum * self._leads
        dist.all_reduce(total)
        record = {"event": "eval", "step": step, "tokens": self._tokens, "samples": self._samples}
        if not self._tokens:
            return record | {"loss": None, "perplexity": None, "warnings": ["the evaluation split has no tokens"]}
        loss = float(total) / self._tokens
        finite = math.isfinite(loss)
        notes = [] if finite else ["the evaluation's loss is not finite"]
        # e^700 is about the largest number there is.
        return record | {
            "loss": loss,
            "perplexity": math.exp(loss) if finite and loss < 700 else None,
            "warnings": notes,
        }
