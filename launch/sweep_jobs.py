"""The jobs of a sweep: each a torchrun in its own directory, its output in `train.log` there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.last_words import find

POLL_S = 0.1
GRACE_S = 15.0  # for torchrun to stop its workers before everything is killed


@dataclass
class Job:
    number: int
    overrides: list[str]
    directory: Path
    extra_arguments: list[str] = field(default_factory=list)
    exit_code: int | None = None
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "train.log"

    def start(self, ranks: int, threads: int) -> None:
        self.directory.mkdir(parents=True)
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", *torchrun, "-m", "launch.train", *self.extra_arguments, *self.overrides]
        environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C reaches the sweep alone, which then stops its jobs in order.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.seconds = -time.monotonic()

    def ended(self) -> bool:
        assert self.process is not None
        self.exit_code = self.process.poll()
        if self.exit_code is None:
            return False
        self.seconds += time.monotonic()
        return True

    def reason(self) -> str:
        """Why it failed, in a line, as far as the job itself said so."""
        return find(self.log.read_text(errors="replace")) or "see its log"


def run_all(jobs: Sequence[Job], ranks: int, max_parallel: int) -> None:
    """Runs every job, `max_parallel` at a time; on an exception (Ctrl-C, SIGTERM) none is left running."""
    threads = max(1, len(os.sched_getaffinity(0)) // (ranks * max_parallel))
    waiting = list(jobs)
    running: list[Job] = []
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        while waiting or running:
            while waiting and len(running) < max_parallel:
                job = waiting.pop(0)
                job.start(ranks, threads)
                running.append(job)
                print(f"#{job.number} started: {' '.join(job.overrides)} ({job.log})", flush=True)
            time.sleep(POLL_S)
            for job in [job for job in running if job.ended()]:
                running.remove(job)
                how = "done" if job.exit_code == 0 else f"FAILED with exit code {job.exit_code}"
                print(f"#{job.number} {how} after {job.seconds:.1f} s", flush=True)
    finally:
        _kill(running)
        signal.signal(signal.SIGTERM, previous)


def _exit_on_signal(number: int, _: object) -> None:
    sys.exit(128 + number)


def _kill(jobs: Sequence[Job]) -> None:
    """Asks each torchrun to stop; past the grace, kills it and its workers (which have sessions of their own)."""
    alive = [job.process for job in jobs if job.process is not None and job.process.poll() is None]
    family = []
    for process in alive:
        try:
            family += psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for child in family:
        try:
            child.kill()  # by pid and start time: a number used again is left alone
        except psutil.NoSuchProcess:
            continue
