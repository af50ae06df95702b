"""Trains the small DLRM, or what the overrides say, in both modes, each in a fresh directory. `make compare` starts here."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODES = ("baseline", "fused")
INTERRUPT_GRACE_S = 60.0
CHECKOUT = Path(__file__).resolve().parents[1]


class TrainingError(RuntimeError):
    """A training run ended with a non-zero exit code, or was interrupted."""


def train_both_modes(out: Path, ranks: int, overrides: Sequence[str] = ()) -> list[Path]:
    """Run `launch.train` under torchrun once a mode, output streamed; returns the two run directories.

    They are `<out>/runs/<time>/<mode>`, new ones each time. Raises TrainingError at the first run that fails.
    """
    batch = fresh_directory(out / "runs")
    environment = dict(os.environ)
    # torchrun's own default, one thread a rank, leaves cores idle; its warning of that would be the first line shown.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    directories = []
    for mode in MODES:
        directory = batch / mode
        command = train_command(mode, ranks, directory, overrides)
        print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)
        code = _wait(subprocess.Popen(command, env=environment, cwd=CHECKOUT))
        if code:
            raise TrainingError(f"the {mode} run failed with exit code {code}; its records are in {directory}")
        directories.append(directory)
    return directories


def _wait(job: subprocess.Popen[bytes]) -> int:
    """Its exit code. On Ctrl-C, which torchrun gets too, the time to end its ranks before this process goes."""
    try:
        return job.wait()
    except KeyboardInterrupt:
        job.wait(timeout=INTERRUPT_GRACE_S)
        raise TrainingError("interrupted") from None


def train_command(mode: str, ranks: int, directory: Path, overrides: Sequence[str]) -> list[str]:
    """One torchrun command line, of `launch.train`'s defaults (dlrm_tiny on synthetic data) but for `overrides`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    choices = [f"comm={mode}", f"hydra.run.dir={directory}"]
    return [*torchrun, "-m", "launch.train", *choices, *overrides]


def fresh_directory(parent: Path) -> Path:
    """Make and return a directory below `parent`, named by the time, that nobody had before."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(1000):
        directory = (parent / (f"{stamp}_{attempt}" if attempt else stamp)).resolve()
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(f"{parent} holds 1000 directories of this second")
