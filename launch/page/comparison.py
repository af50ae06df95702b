"""Pairs each run with the baseline that differs from it in nothing but communication, and says what that shows.

Two runs match when ranks, device and every config key are equal, except for keys that change neither the training nor
its timing (`IGNORED`). Where several baselines match, the median of their figures is the reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from launch.page.runs import Run

IGNORED = (
    *("comm.", "logger.", "run_dir", "dry_run"),
    *("trainer.progress", "trainer.resume", "trainer.checkpoint_every", "trainer.keep_checkpoints"),
    "trainer.profile_steps",
)
EARLY_STEPS = 20
LOSS_TOLERANCE = 1e-5  # relative, over the first EARLY_STEPS steps; later, rounding differences grow on their own
FEW_STEPS = 20
MOST_SHOWN = 4


@dataclass
class Row:
    """A run and what it is measured against."""

    run: Run
    label: str
    group: int  # rows of one group match but for communication
    baselines: list[Run] = field(default_factory=list)
    step_reduction: float | None = None  # percent of the baseline's median step; negative = slower
    exposed_reduction: float | None = None
    within_spread: bool = False  # the interquartile ranges of both step times overlap
    early_loss_difference: float | None = None  # largest relative difference over the first EARLY_STEPS common steps
    loss_difference: float | None = None  # the same over all common steps
    loss_differences: list[tuple[int, float]] = field(default_factory=list)  # (step, relative difference)
    no_baseline: str | None = None  # why there is no reduction

    @property
    def is_baseline(self) -> bool:
        return self.run["comm"] == "baseline"


@dataclass
class Comparison:
    rows: list[Row]
    differing: dict[str, list[Any]]  # config key -> one value a row, for keys on which the runs differ
    warnings: list[str]
    notes: list[str]  # what the figures stand on: synthetic data, the link

    @property
    def pairs(self) -> list[Row]:
        return [row for row in self.rows if row.step_reduction is not None]

    @property
    def num_groups(self) -> int:
        return len({row.group for row in self.rows if row.run.summary})


def compare(runs: Sequence[Run]) -> Comparison:
    """Judge `runs` (any number, any status). Rows come group by group, baselines first, runs without figures last."""
    keys = [_match_key(run) for run in runs]
    first = [(not run.summary, keys.index(key), run["comm"] != "baseline") for run, key in zip(runs, keys, strict=True)]
    order = sorted(range(len(runs)), key=first.__getitem__)
    runs, keys = [runs[index] for index in order], [keys[index] for index in order]
    groups: list[dict[str, Any]] = []
    for key in keys:
        if key not in groups:
            groups.append(key)
    rows = [Row(run, "", groups.index(key)) for run, key in zip(runs, keys, strict=True)]
    differing = _differing(runs)
    _label(rows, differing)
    for row in rows:
        if row.run.summary and not row.is_baseline:
            _measure(row, rows, groups)
    return Comparison(rows, differing, _warnings(rows), _notes(runs))


def _match_key(run: Run) -> dict[str, Any]:
    key = {name: value for name, value in run.config.items() if not name.startswith(IGNORED)}
    if not key:
        key = {name: run[name] for name in ("model", "data", "seed", "steps")}
    return key | {"ranks": run["ranks"], "device": run["device"]}


def _differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Keys on which runs that have a config differ. Ranks are the launch's, not the config's, and are shown too."""
    known = [run for run in runs if run.config]
    names = dict.fromkeys(name for run in known for name in run.config if name != "run_dir")
    differing = {
        name: [run.config.get(name) for run in runs]
        for name in names
        if any(run.config.get(name) != known[0].config.get(name) for run in known)
    }
    ranks = [run["ranks"] for run in runs]
    return differing | ({"ranks": ranks} if len({count for count in ranks if count}) > 1 else {})


def _label(rows: list[Row], differing: dict[str, list[Any]]) -> None:
    """`fused`, or `fused, lr=0.05` where runs differ in more than communication; the directory where that is not
    enough.
    """
    shown = [name for name in differing if not name.startswith(IGNORED)][:3]
    for index, row in enumerate(rows):
        if not row.run["comm"]:
            row.label = row.run.name
            continue
        parts = [f"{name.rpartition('.')[2]}={_short(differing[name][index])}" for name in shown]
        # An unfused run (the fused backend's compute, then its exchange) is a run of comm=fused by its switch.
        kind = "unfused" if row.run["backend"] == "unfused" else row.run["comm"]
        row.label = ", ".join([kind, *parts])
    labels = [row.label for row in rows]
    for row in rows:
        if labels.count(row.label) > 1:
            row.label = f"{row.label} ({row.run.name})"


def _short(value: Any) -> str:
    """A table's rows or an MLP's widths would fill a line: only the first of a long list, and how many there are."""
    if isinstance(value, list) and len(value) > MOST_SHOWN:
        return f"[{value[0]}, ... {len(value)} values]"
    return str(value)


def _measure(row: Row, rows: list[Row], groups: list[dict[str, Any]]) -> None:
    all_baselines = [other for other in rows if other.is_baseline]
    matching = [other.run for other in all_baselines if other.group == row.group]
    row.baselines = [run for run in matching if run.status == "ok" and _finite(run["step_ms"])]
    if not row.baselines:
        row.no_baseline = _why_no_baseline(row, matching, all_baselines, groups)
        return
    _measure_losses(row)
    if row.run.status != "ok" or not _finite(row.run["step_ms"]):
        row.no_baseline = f"this run is {row.run.status}" if row.run.status != "ok" else "no step time"
        return
    row.step_reduction = _reduction(row, "step_ms")
    row.exposed_reduction = _reduction(row, "exposed_comm_ms")
    fastest_quarter, slowest_quarter = _reference(row, "step_ms_p25"), _reference(row, "step_ms_p75")
    low, high = row.run["step_ms_p25"], row.run["step_ms_p75"]
    if all(map(_finite, (fastest_quarter, slowest_quarter, low, high))):
        row.within_spread = low <= slowest_quarter and fastest_quarter <= high


def _why_no_baseline(row: Row, matching: list[Run], baselines: list[Row], groups: list[dict[str, Any]]) -> str:
    if matching:
        return f"its baseline {matching[0].name} is {matching[0].status} or has no step time"
    if not baselines:
        return "no baseline run was given"

    def differences(other: Row) -> list[str]:
        mine, theirs = groups[row.group], groups[other.group]
        return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]

    nearest = min(baselines, key=lambda other: len(differences(other)))
    names = differences(nearest)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"no matching baseline; the nearest, {nearest.run.name}, differs in {', '.join(names[:3])}{more}"


def _measure_losses(row: Row) -> None:
    reference = {event["step"]: event["loss"] for event in row.baselines[0].train}
    for event in row.run.train:
        expected = reference.get(event["step"])
        if _finite(expected) and _finite(event["loss"]):
            difference = abs(event["loss"] - expected) / max(abs(expected), 1e-12)
            row.loss_differences.append((event["step"], difference))
    if row.loss_differences:
        row.loss_difference = max(difference for _, difference in row.loss_differences)
        row.early_loss_difference = max((d for step, d in row.loss_differences if step <= EARLY_STEPS), default=None)


def _reference(row: Row, key: str) -> float | None:
    values = [run[key] for run in row.baselines if _finite(run[key])]
    return statistics.median(values) if values else None


def _reduction(row: Row, key: str) -> float | None:
    before, after = _reference(row, key), row.run[key]
    if not before or not _finite(after):
        return None
    return 100.0 * (before - after) / before


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _warnings(rows: list[Row]) -> list[str]:
    warnings = []
    for row in rows:
        run, who = row.run, row.label
        if run.status != "ok":
            warnings.append(f"{who}: {run.status}" + (f" ({run.reason})" if run.reason else ""))
        if run["comm"] == "fused" and "baseline" in (run["backend"] or "").split("+"):
            reasons = {c["reason"] for c in run["counters"] or () if c["backend"] == "baseline" and c["reason"]}
            warnings.append(
                f"{who}: fused was asked for and baseline ran" + (f": {'; '.join(sorted(reasons))}" if reasons else "")
            )
        warnings += [f"{who}: {text}" for text in run["warnings"] or ()]
        if (
            _finite(run["auc"])
            and abs(run["auc"] - 0.5) < 0.005
            and not any("AUC" in text for text in run["warnings"] or ())
        ):
            warnings.append(f"{who}: AUC is {run['auc']:.4f}: nothing was learned, or the metric is degenerate")
        if _finite(run["step_ms"]) and (run["measured_steps"] or 0) < FEW_STEPS:
            warnings.append(f"{who}: only {run['measured_steps'] or 0} steps after warm-up; its medians are rough")
        if row.early_loss_difference is not None and row.early_loss_difference > LOSS_TOLERANCE:
            warnings.append(
                f"{who}: losses differ from the baseline's by {row.early_loss_difference:.1e} (relative) within the "
                f"first {EARLY_STEPS} steps; up to {LOSS_TOLERANCE:.0e} is rounding"
            )
        if row.no_baseline and run.status == "ok":
            warnings.append(f"{who}: {row.no_baseline}, so no reduction is given")
        versions = [baseline["versions"] for baseline in row.baselines]
        if any(other != run["versions"] for other in versions):
            warnings.append(f"{who}: package versions differ from its baseline's")
    return list(dict.fromkeys(warnings))


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if any(run["data_is_synthetic"] for run in runs):
        best = sorted({run["bayes_auc"] for run in runs if _finite(run["bayes_auc"])})
        bound = (
            f"; no model can exceed an AUC of {', '.join(f'{auc:.4f}' for auc in best)} on it (the Bayes AUC)"
            if best
            else ""
        )
        notes.append(f"Synthetic data: generated click logs, not real ones{bound}.")
    links = list(dict.fromkeys(f"{run['comm']}: {run['link']}" for run in runs if run["link"]))
    if links:
        notes.append(f"Link between ranks: {'; '.join(links)}.")
    if any("host" in (run["backend"] or "").split("+") for run in runs):
        notes.append(
            "On a CPU host the baseline moves data over TCP and the fused operator through shared memory, so the "
            "difference between them is both. The operator benchmark (launch.bench) has the column that tells them "
            "apart: the same lookups, then an exchange over the same shared memory."
        )
    return notes
