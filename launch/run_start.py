"""What happens between composing a config and training: checks, the dry run, one directory for all ranks.

A Hydra callback, since Hydra makes the run's directory before it calls the program.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from launch.config_errors import CONFIG_ERRORS, stop, typed
from launch.run_directory import claim, share
from trainers.config import RunConfig
from trainers.config_rules import ConfigError, check


class RunStart(Callback):
    """Hydra turns a callback's exceptions into warnings, so every way out of here is an exit."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _or_exit(_start_run, config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _or_exit(_start_sweep, config)


def _or_exit(step: Any, config: DictConfig) -> None:
    try:
        step(config)
    except CONFIG_ERRORS as error:
        stop(error)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _start_run(config: DictConfig) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run_config = typed(_without_run_dir(config))
    check(run_config)
    if run_config.dry_run:
        if rank == 0:
            from launch.dry_run import report

            report(run_config, run_config.dry_run_ranks or world)
        sys.exit(0)
    if run_config.trainer.ranks_per_gpu > 1 and world > 1:
        _share_cards(run_config)
    run_dir = None
    if rank == 0:
        run_dir = Path(str(config.hydra.run.dir)).absolute()
        if _is_set_by_hand("hydra.run.dir", config):
            run_dir.mkdir(parents=True, exist_ok=True)
        else:
            run_dir = claim(run_dir)
    if world > 1:
        run_dir = share(run_dir, rank, run_config.comm.timeout_s)
    config.hydra.run.dir = str(run_dir)


def _share_cards(config: RunConfig) -> None:
    from launch.lab import LabError, torchrun

    try:
        torchrun.enter(config.trainer.ranks_per_gpu, timeout_s=config.comm.timeout_s)
    except LabError as error:
        raise ConfigError(f"trainer.ranks_per_gpu={config.trainer.ranks_per_gpu}: {error}") from error


def _start_sweep(config: DictConfig) -> None:
    if "RANK" in os.environ:
        raise ConfigError(
            "a sweep can't run inside torchrun, where every rank would run all of it; "
            "start it with `python -m launch.train -m ...`, it starts torchrun for each job"
        )
    if str(config.hydra.launcher.get("_target_")).endswith("BasicLauncher"):
        raise ConfigError("hydra/launcher=basic would train every job in one process; use hydra/launcher=torchrun")
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    if not _is_set_by_hand("hydra.sweep.dir", config):
        sweep_dir = claim(sweep_dir)
    config.hydra.sweep.dir = str(sweep_dir)


def _without_run_dir(config: DictConfig) -> DictConfig:
    """`run_dir` resolves only once Hydra has made the directory."""
    config = config.copy()
    config.run_dir = ""
    return config


def _is_set_by_hand(key: str, config: DictConfig) -> bool:
    return any(override.startswith(f"{key}=") for override in config.hydra.overrides.hydra)
