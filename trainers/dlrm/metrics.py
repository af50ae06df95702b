"""AUC and normalised entropy over every sample of an evaluation, exactly.

Predictions are gathered on rank 0 (12 bytes a sample there), so ranks may hold different numbers of samples, also none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from trainers.dlrm.feed import ClickWork

DEGENERATE_AUC = 0.005  # this close to 0.5 a ranking says nothing


@dataclass(frozen=True)
class Evaluation:
    """`loss`: mean binary cross-entropy in nats. `ne`: `loss` over that of always predicting the mean label.

    `auc` and `ne` are None where they are not defined; `warnings` says why, and flags an AUC of 0.5.
    """

    loss: float | None
    auc: float | None
    ne: float | None
    samples: int
    warnings: list[str] = field(default_factory=list)

    def as_event(self, step: int) -> dict[str, Any]:
        values = {"loss": self.loss, "auc": self.auc, "ne": self.ne, "samples": self.samples}
        return {"event": "eval", "step": step, **values, "warnings": self.warnings}


class ClickEvaluation:
    """See `trainers.engine.Evaluation`. `forward`: logits [b] of this rank's samples."""

    def __init__(self, forward: Callable[[ClickWork], torch.Tensor]) -> None:
        self._forward = forward
        self._logits, self._labels = [torch.zeros(0)], [torch.zeros(0)]

    def add(self, work: ClickWork) -> None:
        self._logits.append(self._forward(work).cpu())
        self._labels.append(work.batch.labels.float().cpu())

    def event(self, step: int) -> dict[str, Any] | None:
        logits, labels = gather(torch.cat(self._logits)), gather(torch.cat(self._labels))
        if logits is None or labels is None:
            return None
        return evaluate(logits, labels).as_event(step)


def evaluate(logits: torch.Tensor, labels: torch.Tensor) -> Evaluation:
    """Of all samples: logits [n] (any float type), labels [n] in {0, 1}."""
    samples = labels.numel()
    if samples == 0:
        return Evaluation(None, None, None, 0, ["the evaluation split has no samples"])
    logits, labels = logits.double(), labels.double()
    loss = float(binary_cross_entropy_with_logits(logits, labels))
    if not bool(torch.isfinite(logits).all()):
        return Evaluation(loss, None, None, samples, ["predictions are not finite"])
    mean = float(labels.mean())
    if mean in (0.0, 1.0):
        reason = f"every label of the evaluation is {int(mean)}: AUC and NE are not defined"
        return Evaluation(loss, None, None, samples, [reason])
    entropy = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auc = float(binary_auroc(logits.sigmoid(), labels.long(), thresholds=None))
    degenerate = abs(auc - 0.5) < DEGENERATE_AUC
    notes = [f"AUC is {auc:.4f}: the model ranks no better than chance"] if degenerate else []
    return Evaluation(loss, auc, loss / entropy, samples, notes)


def gather(values: torch.Tensor) -> torch.Tensor | None:
    """Every rank's [n_r] of one dtype, one after the other, on rank 0; None elsewhere."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([values.numel()]))
    counts = [int(size) for size in sizes]
    padded = torch.zeros(max(1, *counts), dtype=values.dtype)
    padded[: values.numel()] = values
    parts = [torch.empty_like(padded) for _ in range(world)] if rank == 0 else None
    dist.gather(padded, parts, dst=0)
    if parts is None:
        return None
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
