"""Ends an MPS daemon when its owner has ended: a program of its own, so that no way to die leaves a daemon behind.

mps_keeper.py CONTROL_PROGRAM DIRECTORY     with its stdin held open by the owner
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ASK_S = 10.0
END_S = 2.0
LONGEST_S = 3 * (ASK_S + END_S)  # what the keeper takes at most once its owner has gone


def ask(control: str, directory: Path, command: str) -> str | None:
    """The daemon's answer to a control command; None where no daemon answers."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(directory)}
    environment.pop("LD_PRELOAD", None)
    try:
        done = subprocess.run(
            [control], input=command + "\n", env=environment, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def daemon_pid(directory: Path) -> int | None:
    """The daemon that serves `directory`, as it wrote it there; None where it no longer runs."""
    try:
        pid = int((directory / "nvidia-cuda-mps-control.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"mps-control" in command else None  # else the number belongs to another process by now


def end(control: str, directory: Path) -> bool:
    """Ask it to quit, then to quit at once whatever its clients do, then kill it. False where it still runs."""
    if daemon_pid(directory) is None:
        ask(control, directory, "quit")  # a daemon that has not written its number yet
        return daemon_pid(directory) is None
    for command in ("quit", "quit -t 1"):
        ask(control, directory, command)
        if _gone(directory):
            return True
    pid = daemon_pid(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _gone(directory)


def _gone(directory: Path) -> bool:
    deadline = time.monotonic() + END_S
    while daemon_pid(directory) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def main(control: str, directory: Path) -> int:
    sys.stdin.read()  # until the owner closes its end, or ends
    if not end(control, directory):
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
