"""Where a run's records go: JSONL always, W&B when asked; rank 0 only."""

from __future__ import annotations

import re
from pathlib import Path

from trainers.config import LoggerConfig
from trainers.loggers.base import STATUSES, Logger, Loggers
from trainers.loggers.jsonl import JsonlLogger, read_events, surviving

__all__ = ["STATUSES", "JsonlLogger", "Logger", "Loggers", "make_loggers", "read_events", "surviving", "sweep_name"]

KINDS = ("jsonl", "wandb")


def make_loggers(config: LoggerConfig, run_dir: str | Path, rank: int) -> Loggers:
    """The loggers of this rank: those `logger.kind` asks for on rank 0, none elsewhere.

    W&B groups runs by `logger.group`, or by the sweep's directory where the run is one of a sweep. Raises ValueError
    for an unknown kind or mode, and RuntimeError where W&B is asked for and not installed.
    """
    if config.kind not in KINDS:
        raise ValueError(f"logger.kind is {config.kind!r}; allowed: {', '.join(KINDS)}")
    if rank != 0:
        return Loggers([])
    loggers: list[Logger] = [JsonlLogger(run_dir)]
    if config.kind == "wandb":
        try:
            from trainers.loggers.wandb_logger import WandbLogger
        except ImportError as error:
            raise RuntimeError(f"logger=wandb needs the wandb package: {error}") from error
        loggers.append(
            WandbLogger(
                run_dir,
                project=config.project,
                entity=config.entity,
                group=config.group or sweep_name(run_dir),
                mode=config.wandb_mode,
                tags=list(config.tags),
            )
        )
    return Loggers(loggers)


def sweep_name(run_dir: str | Path) -> str | None:
    """The name of the Hydra sweep that `run_dir` belongs to (its directory holds `multirun.yaml`), or None.

    Hydra's default sweep directory is `<date>/<time>`; a bare time would join sweeps of different days.
    """
    for parent in list(Path(run_dir).resolve().parents)[:2]:
        if (parent / "multirun.yaml").is_file():
            bare_time = re.fullmatch(r"[\d\-_.:]+", parent.name)
            return f"{parent.parent.name}_{parent.name}" if bare_time else parent.name
    return None
