"""`summary.json`: what a run came to, from its train and eval records. One object, the same keys whatever happened.

Medians leave out the first `warmup` steps that this process ran (a resumed run warms up again), and are null where
nothing is left. The medians of a step's parts need not add up to the median step.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from trainers.loggers import strict_json
from trainers.loggers.base import STATUSES

FILE_NAME = "summary.json"
TIMINGS = ("step_ms", "data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms")
"""Milliseconds of one step on rank 0; the last four are disjoint parts of the first."""
MEDIANS = (*TIMINGS, "samples_per_s", "tokens_per_s", "mfu")
"""The last two are a Transformer's; `mfu` is None where the card's peak is not known."""

SUMMARY_KEYS = (
    *("comm", "backend", "ranks", "seed", "steps", "final_loss", "eval_loss", "auc", "ne", "perplexity"),
    *MEDIANS,
    *("step_ms_p25", "step_ms_p75", "measured_steps", "warmup"),
    *("model", "data", "data_is_synthetic", "bayes_auc", "device", "link", "counters", "warnings"),
    *("status", "reason", "versions", "run_dir", "wandb_id"),
)
_DISTRIBUTIONS = ("fusecomm", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


@dataclass
class RunFacts:
    """What a summary says that step records do not."""

    comm: str  # fused | baseline | auto, as configured
    ranks: int
    seed: int
    model: str
    data: str
    data_is_synthetic: bool
    device: str  # "cpu", or the accelerator's name
    run_dir: str
    backend: str | None = None  # what really ran; None where no step did
    link: str | None = None  # for people: "CPU host, shared memory"
    bayes_auc: float | None = None  # the best AUC any model can reach on generated data
    counters: list[dict[str, Any]] = field(default_factory=list)  # `counter_rows`
    warnings: list[str] = field(default_factory=list)
    wandb_id: str | None = None


class StepStatistics:
    """Collects what the summary needs of every train and eval record; 8 bytes a figure and step."""

    def __init__(self, warmup: int):
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}; it must be 0 or more")
        self._warmup = warmup
        self._seen = 0
        self._columns = {key: array("d") for key in MEDIANS}
        self._last_train: Mapping[str, Any] | None = None
        self._last_eval: Mapping[str, Any] | None = None
        self._warnings: list[str] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a `train` record (`step`, `loss`, and what there is of MEDIANS) or an `eval` record; ignore any other."""
        if event["event"] == "train":
            self._last_train = event
            self._seen += 1
            if self._seen > self._warmup:
                for key, column in self._columns.items():
                    if event.get(key) is not None:
                        column.append(event[key])
        elif event["event"] == "eval":
            self._last_eval = event
            self._warnings = list(event.get("warnings") or ())  # an early evaluation's degenerate metric may recover

    @property
    def steps(self) -> int:
        """How many steps this process has trained."""
        return self._seen

    def figures(self) -> dict[str, Any]:
        """What the records alone say: last step, losses, metrics, medians, warnings."""
        train, evaluation = self._last_train or {}, self._last_eval or {}
        measured = len(self._columns["step_ms"])
        warnings = list(self._warnings)
        if self._seen and not measured:
            warnings.append(f"{self._seen} steps, all of them warm-up (trainer.warmup={self._warmup}): no medians")
        low, high = _quartiles(self._columns["step_ms"])
        return {
            "steps": train.get("step", evaluation.get("step", 0)),
            "final_loss": train.get("loss"),
            "eval_loss": evaluation.get("loss"),
            "auc": evaluation.get("auc"),
            "ne": evaluation.get("ne"),
            "perplexity": evaluation.get("perplexity"),
            **{key: statistics.median(column) if column else None for key, column in self._columns.items()},
            "step_ms_p25": low,
            "step_ms_p75": high,
            "measured_steps": measured,
            "warmup": self._warmup,
            "warnings": warnings,
        }

    def summary(self, facts: RunFacts, status: str, reason: str | None = None) -> dict[str, Any]:
        """The object of `summary.json`: exactly SUMMARY_KEYS, in that order."""
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}; allowed: {', '.join(STATUSES)}")
        figures = self.figures()
        warnings = list(dict.fromkeys([*facts.warnings, *figures["warnings"]]))
        ending = {"warnings": warnings, "status": status, "reason": reason, "versions": versions()}
        values = asdict(facts) | figures | ending
        return {key: values[key] for key in SUMMARY_KEYS}


def write_summary(run_dir: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write `<run_dir>/summary.json` so that a reader sees the whole of it or none; returns its path."""
    path = Path(run_dir) / FILE_NAME
    partial = path.with_name(f"{FILE_NAME}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(strict_json.dumps(summary, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def with_earlier_figures(run_dir: str | Path, summary: dict[str, Any]) -> dict[str, Any]:
    """`summary` of a process that found nothing left to train, or the one of the run that did train to this step here.

    The new evaluation replaces the old one either way.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return summary
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if (earlier["status"], earlier["steps"]) != ("ok", summary["steps"]):
        return summary
    return earlier | {key: summary[key] for key in ("eval_loss", "auc", "ne", "perplexity", "warnings")}


def counter_rows(counters: Mapping[tuple[str, str, str], int]) -> list[dict[str, Any]]:
    """`fused_ops.counters()` as JSON: one object an operator, backend and reason, with its number of calls."""
    return [
        {"operator": operator, "backend": backend, "reason": reason, "calls": calls}
        for (operator, backend, reason), calls in sorted(counters.items())
    ]


def backend_that_ran(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The backends of `counter_rows` by name, joined by `+` where calls went to several; None where nothing was
    counted. Which kernels baseline took (`<operator>_kernels`) is another question.
    """
    ran = {row["backend"] for row in rows if row["calls"] and not row["operator"].endswith("_kernels")}
    return "+".join(sorted(ran)) or None


def versions() -> dict[str, str]:
    """Versions of the packages a timing depends on, those that are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _quartiles(column: array) -> tuple[float | None, float | None]:
    finite = [value for value in column if math.isfinite(value)]
    if len(finite) < 2:
        return None, None
    low, _, high = statistics.quantiles(finite, n=4)
    return low, high
