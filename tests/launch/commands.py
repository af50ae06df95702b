"""Starts `launch.train` as users do, in a directory of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE_TRAINING = ROOT / "tests" / "launch" / "fake_training"
PYTHON = (sys.executable, "-m", "launch.train")
TORCHRUN_OF_TWO = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "launch.train"),
)


def environment(fake: bool = True, **more: str) -> dict[str, str]:
    """The environment without any launcher's variables; `fake` puts the stand-in for `trainers.run` first."""
    path = os.pathsep.join(map(str, [FAKE_TRAINING, ROOT] if fake else [ROOT]))
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    return {**ours, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(
    command: Sequence[str], *arguments: str, cwd: Path, fake: bool = True, timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=environment(fake, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
