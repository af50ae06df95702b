"""What a run's input is, for its summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DataInfo:
    """samples: of a split; None = endless. bayes_auc: the best AUC any model can reach; None where it is not known."""

    name: str
    synthetic: bool
    samples: dict[str, int | None]
    bayes_auc: float | None = None
    max_ids: list[int] | None = None
