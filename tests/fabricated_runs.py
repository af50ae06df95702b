"""Writes run directories as a training run would, through the project's own loggers and summary, without training."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import yaml

from trainers.loggers.jsonl import JsonlLogger
from trainers.run_summary import RunFacts, StepStatistics, write_summary

PARTS = {"baseline": (0.4, 0.9, 5.0, 4.5), "fused": (0.4, 0.9, 5.2, 0.8)}  # data, index distribution, compute, exposed


def write_run(
    path: Path,
    comm: str,
    *,
    steps: int = 60,
    seed: int = 0,
    lr: float = 0.1,
    ranks: int = 2,
    warmup: int = 5,
    scale: float = 1.0,
    loss_offset: float = 0.0,
    nan_from: int | None = None,
    status: str = "ok",
    reason: str | None = None,
    finished: bool = True,
    **facts: Any,
) -> Path:
    """A run directory at `path`. `scale` stretches its times, `loss_offset` moves its losses, `nan_from` ends them."""
    config = {
        "comm": {"mode": comm, "backend": "auto"},
        "model": {"name": "dlrm_tiny"},
        "data": {"kind": "synthetic", "batch_size": 512},
        "optim": {"lr": lr},
        "trainer": {"steps": steps, "seed": seed, "warmup": warmup},
        "run_dir": str(path),
    }
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    logger, statistics = JsonlLogger(path), StepStatistics(warmup)
    logger.start(config)
    losses, times = random.Random(seed), random.Random(f"{seed}{comm}")
    for step in range(1, steps + 1):
        noise = losses.gauss(0, 0.012)
        broken = nan_from is not None and step >= nan_from
        loss = math.nan if broken else 0.47 + 0.22 * math.exp(-step * lr / 6) + noise + loss_offset
        data, index, compute, exposed = (part * scale * times.lognormvariate(0, 0.12) for part in PARTS[comm])
        step_ms = data + index + compute + exposed
        record = {
            "event": "train",
            "step": step,
            "loss": loss,
            "lr": lr,
            "step_ms": step_ms,
            "data_ms": data,
            "index_dist_ms": index,
            "compute_ms": compute,
            "exposed_comm_ms": exposed,
            "samples_per_s": 512e3 / step_ms,
        }
        logger.log(record)
        statistics.add(record)
    if status == "ok":
        evaluation = {
            "event": "eval",
            "step": steps,
            "loss": 0.5,
            "auc": 0.74,
            "ne": 0.86,
            "samples": 9000,
            "warnings": [],
        }
        logger.log(evaluation)
        statistics.add(evaluation)
    if finished:
        logger.finish(status, reason)
        known: dict[str, Any] = {
            "comm": comm,
            "backend": "host" if comm == "fused" else "baseline",
            "ranks": ranks,
            "seed": seed,
            "model": "dlrm_tiny",
            "data": "synthetic",
            "data_is_synthetic": True,
            "bayes_auc": 0.8012,
            "device": "cpu",
            "link": "CPU host, shared memory" if comm == "fused" else "CPU host, gloo over TCP",
            "run_dir": str(path),
        }
        write_summary(path, statistics.summary(RunFacts(**(known | facts)), status, reason))
    return path
