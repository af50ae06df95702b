"""Hydra's grid sweeper, with a summary at the end, and no job's failure stopping another."""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from launch.sweep_jobs import Job


class EveryJobSweeper(BasicSweeper):
    def validate_batch_is_legal(self, batch: Any) -> None:
        """Left to the jobs: a combination that doesn't compose is that job's failure."""

    def sweep(self, arguments: list[str]) -> Any:
        """Returns the jobs; exits with 1 if any failed."""
        jobs: list[Job] = [result.return_value for batch in super().sweep(arguments) for result in batch]
        print(summary(jobs), flush=True)
        if any(job.exit_code != 0 for job in jobs):
            sys.exit(1)
        return jobs


def summary(jobs: list[Job]) -> str:
    """A table, one line a job, with the reason below each that failed."""
    good = sum(job.exit_code == 0 for job in jobs)
    width = max(len(" ".join(job.overrides)) for job in jobs)
    lines = [
        f"\n{good} of {len(jobs)} jobs succeeded",
        f"{'job':>4}  {'result':<9} {'seconds':>8}  {'overrides':<{width}}  log",
    ]
    for job in jobs:
        result = "ok" if job.exit_code == 0 else f"exit {job.exit_code}"
        overrides = " ".join(job.overrides)
        lines.append(f"{job.number:>4}  {result:<9} {job.seconds:>8.1f}  {overrides:<{width}}  {job.log}")
        if job.exit_code != 0:
            lines.append(f"      {job.reason()}")
    if good:
        lines.append(f"compare them: python -m launch.compare {jobs[0].directory.parent}")
    return "\n".join(lines)
