"""Hydra launcher: one torchrun job for each combination of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from launch.sweep_jobs import Job, run_all
from trainers.config_rules import ConfigError


class TorchrunLauncher(Launcher):
    def __init__(self, nproc_per_node: int, max_parallel: int) -> None:
        for name, value in (("nproc_per_node", nproc_per_node), ("max_parallel", max_parallel)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"hydra.launcher.{name}={value} must be an integer of at least 1")
        self.nproc_per_node = nproc_per_node
        self.max_parallel = max_parallel

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs; each JobReturn carries its `Job`, failed or not."""
        jobs = [self._job(initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides)]
        for job in jobs:
            if job.directory.exists():
                raise ConfigError(f"{job.directory} exists already; choose another hydra.sweep.dir")
        run_all(jobs, self.nproc_per_node, self.max_parallel)
        results = []
        for job in jobs:
            result = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
            result.return_value = job
            results.append(result)
        return results

    def _job(self, number: int, overrides: list[str]) -> Job:
        hydra = self.config.hydra
        directory = Path(hydra.sweep.dir) / str(number)
        extra = [f"hydra.run.dir={_quoted(str(directory))}", "hydra.mode=RUN"]
        if OmegaConf.select(self.config, "logger.group") is None:
            extra.append(f"logger.group={_quoted(Path(hydra.sweep.dir).name)}")
        for source in hydra.runtime.config_sources:
            if source.provider == "command-line":
                extra += ["--config-dir", source.path]
        return Job(number, overrides, directory, extra)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
