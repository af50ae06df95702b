"""The CUDA Multi-Process Service (MPS), which lets kernels of several processes run on one card at the same time.

Processes find the daemon by CUDA_MPS_PIPE_DIRECTORY. Without one they take turns on the card: right, but a barrier then
costs milliseconds, and no timing means anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.lab import mps_keeper
from launch.lab.errors import LabError

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
START_S = 20.0


def control_program() -> str:
    """The path of `nvidia-cuda-mps-control`; LabError where there is none."""
    found = shutil.which(CONTROL)
    if found is None:
        raise LabError(
            f"{CONTROL} is not on PATH (it comes with the NVIDIA driver): ranks cannot share a card at speed; mps=off "
            "lets them take turns, which is right and slow"
        )
    return found


def servers(directory: Path) -> list[str] | None:
    """Process ids of the servers of the daemon in `directory` (one appears with its first client); None = no daemon."""
    listed = mps_keeper.ask(control_program(), directory, "get_server_list")
    return None if listed is None else listed.split()


class PrivateMps:
    """A daemon of this process's own. A keeper process ends it when this process closes it or ends, however it ends."""

    def __init__(self, directory: Path | None = None) -> None:
        """Start it in `directory` (None: a new temporary one, removed at the end). LabError where that fails."""
        control = control_program()
        self.directory = directory or Path(tempfile.mkdtemp(prefix="fusecomm-mps-"))
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(self.directory.iterdir()):
            raise LabError(
                f"{self.directory} is in use by another MPS daemon, or was left by one; name an empty directory"
            )
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", mps_keeper.__file__, control, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the owner
        )
        try:
            self._start(control)
        except BaseException:
            self.close()
            raise

    def _start(self, control: str) -> None:
        said = self.directory / "start.log"
        try:
            with said.open("wb") as log:  # not a pipe: the daemon would hold it open
                done = subprocess.run(
                    [control, "-d"],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=START_S,
                    check=False,
                )
            problem = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer within {START_S:g} s"
        if not problem and servers(self.directory) is None:
            problem = "it does not answer"
        if problem:
            logs = [
                path.read_text(errors="replace").split("\n")
                for path in (said, self.directory / "control.log")
                if path.exists()
            ]
            last = next((line.strip() for log in logs for line in reversed(log) if line.strip()), "it left no word")
            raise LabError(f"the MPS daemon did not start ({problem}): {last}")

    @property
    def environment(self) -> dict[str, str]:
        """What its clients need."""
        return {PIPES: str(self.directory), LOGS: str(self.directory)}

    def outlive_exec(self) -> None:
        """Let the daemon live on when this process replaces itself (os.exec): until the new program ends."""
        assert self._keeper.stdin is not None
        os.set_inheritable(self._keeper.stdin.fileno(), True)

    def close(self) -> None:
        """End the daemon and remove the directory. LabError where it does not end."""
        assert self._keeper.stdin is not None
        if self._keeper.stdin.closed:
            return
        self._keeper.stdin.close()
        try:
            code = self._keeper.wait(mps_keeper.LONGEST_S)
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            raise LabError(
                f"the MPS daemon in {self.directory} could not be ended; "
                f"`echo quit | {PIPES}={self.directory} {CONTROL}` asks it again"
            )
