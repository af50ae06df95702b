"""What every row says of the run: versions, commit, machine, command."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fused_ops
from launch.bench.settings import BenchSettings


def of_run(settings: BenchSettings, words: list[str]) -> dict[str, Any]:
    return {
        "op": settings.op,
        "device": settings.device,
        "ranks": settings.ranks,
        "threads": settings.threads,
        "torch": torch.__version__,
        "fusecomm": fused_ops.__version__,
        "commit": commit(),
        "cpu": _cpu_name(),
        "command": "python -m launch.bench " + " ".join(words),
    }


def commit() -> str | None:
    """FUSECOMM_COMMIT, for a copy without its git directory; else what git says; else None."""
    if named := os.environ.get("FUSECOMM_COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
