"""Run directories as they are on disk: finished, failed, still running, or not there. Nothing is dropped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainers import run_summary
from trainers.loggers import jsonl, strict_json

CONFIG_FILE = "config.yaml"
# A sweep job that its launcher could not even configure leaves a log and nothing else.
RUN_FILES = (run_summary.FILE_NAME, jsonl.FILE_NAME, CONFIG_FILE, "train.log")
_NOT_RUNS = ("wandb", "checkpoints")


@dataclass
class Run:
    """One run directory. `status` is ok, failed, unfinished (running or killed), missing or unreadable; `reason` says
    why.
    """

    path: Path
    name: str
    status: str
    reason: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)  # keys of `run_summary.SUMMARY_KEYS`; empty where unknown
    config: dict[str, Any] = field(default_factory=dict)  # flat: {"optim.lr": 0.1}
    train: list[dict[str, Any]] = field(default_factory=list)  # train records, one a step at most
    evals: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        """A figure of the summary, None where it is unknown."""
        return self.summary.get(key)


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """The runs at or below `paths`, in order, each once. A path without any is one run with status `missing`."""
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            missing = Run(path, path.name, "missing", f"{path} is not a directory")
            found.setdefault(path.resolve(), missing)
            continue
        directories = list(_run_directories(path))
        for directory in directories:
            found.setdefault(directory.resolve(), read_run(directory))
        if not directories:
            reason = f"no {' or '.join(RUN_FILES[:2])} in {path} or below"
            found.setdefault(path.resolve(), Run(path, path.name, "missing", reason))
    runs = list(found.values())
    _name_apart(runs)
    return runs


def read_run(path: Path) -> Run:
    """Read one run directory; what cannot be read makes the run `unreadable`, with the reason."""
    run = Run(path, path.name, "unfinished", "no summary.json: still running, or killed")
    try:
        if (path / CONFIG_FILE).is_file():
            run.config = _flatten(yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8")) or {})
        if (path / jsonl.FILE_NAME).is_file():
            events = jsonl.surviving(jsonl.read_events(path / jsonl.FILE_NAME))
            run.train = [event for event in events if event["event"] == "train"]
            run.evals = [event for event in events if event["event"] == "eval"]
        summary = _read_summary(path)
        if summary is not None:
            run.summary, run.status, run.reason = summary, summary.get("status") or "failed", summary.get("reason")
        elif run.train:
            run.summary = _summary_so_far(run)
        elif not (path / jsonl.FILE_NAME).is_file():
            run.status, run.reason = "failed", "ended before its first record; see its train.log"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        text = str(error).splitlines() or [""]
        run.status, run.reason = "unreadable", f"{type(error).__name__}: {text[0]}"
    return run


def _run_directories(path: Path) -> Iterable[Path]:
    if _is_run(path):
        yield path
        return
    for child in sorted(path.iterdir(), key=lambda entry: _natural(entry.name)):
        if child.is_dir() and not child.name.startswith(".") and child.name not in _NOT_RUNS:
            yield from _run_directories(child)


def _is_run(path: Path) -> bool:
    """A comparison's own output also holds a `summary.json`, but that one is a list."""
    if any((path / name).is_file() for name in RUN_FILES[1:]):
        return True
    if not (path / run_summary.FILE_NAME).is_file():
        return False
    with (path / run_summary.FILE_NAME).open(encoding="utf-8", errors="replace") as file:
        return not file.read(64).lstrip().startswith("[")


def _read_summary(path: Path) -> dict[str, Any] | None:
    file = path / run_summary.FILE_NAME
    return strict_json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _summary_so_far(run: Run) -> dict[str, Any]:
    """Figures of a run without a summary, from its records."""
    statistics = run_summary.StepStatistics(warmup=int(run.config.get("trainer.warmup") or 0))
    for event in (*run.train, *run.evals):
        statistics.add(event)
    config = run.config
    facts = {
        "comm": config.get("comm.mode"),
        "seed": config.get("trainer.seed"),
        "model": config.get("model.name"),
        "data": config.get("data.kind"),
        "data_is_synthetic": config.get("data.kind") in ("synthetic", "random"),
        "device": config.get("trainer.device"),
    }
    return statistics.figures() | {key: value for key, value in facts.items() if value is not None}


def _name_apart(runs: list[Run]) -> None:
    """Name each run by the part of its path that the others do not share."""
    if len(runs) < 2:
        return
    paths = [str(run.path.resolve()) for run in runs]
    common = os.path.commonpath(paths)
    for run, path in zip(runs, paths, strict=True):
        run.name = os.path.relpath(path, common) if path != common else run.path.name


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _natural(name: str) -> tuple[bool, int, str]:
    return (not name.isdigit(), int(name) if name.isdigit() else 0, name)
