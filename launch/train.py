"""Trains a model: `torchrun --nproc-per-node 2 -m launch.train [group=option] [key=value] ...`; `--help` says more.

`python -m launch.train` is a run of one rank, and with `-m` a sweep of torchrun jobs.
Exit codes: 0 trained; 1 failed; 2 the config cannot run.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf

from launch.config_errors import CONFIG_ERRORS, stop, typed
from launch.last_words import say
from launch.run_directory import join_alone
from launch.run_result import in_one_line
from trainers.config import RunConfig, register_schema

ROOT = Path(__file__).resolve().parent.parent
TEXT_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i")


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="config")
def train(config: DictConfig) -> None:
    """One rank of one run; never returns."""
    run_config = typed(config)
    if "RANK" not in os.environ:
        join_alone()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        OmegaConf.save(OmegaConf.structured(run_config), Path(run_config.run_dir) / "config.yaml")
        print(f"run directory: {run_config.run_dir}", flush=True)
    _leave(_run(run_config, rank, world))


def _run(config: RunConfig, rank: int, world: int) -> int:
    try:
        from trainers.run import run

        summary = run(config, rank, world)
        if rank == 0:
            print(in_one_line(summary), flush=True)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # The last line is the note that names the rank that failed first, where there is one.
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        say(f"rank {rank} failed: {said}", traceback.format_exc())
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    # Threads of the collective library may abort an interpreter that is being torn down, after a run that went well.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    sys.path.insert(0, str(ROOT / "launch" / "plugins"))  # Hydra finds plugins by the package name hydra_plugins
    register_schema()
    if os.environ.get("RANK", "0") != "0" and any(arg.split("=")[0] in TEXT_FLAGS for arg in sys.argv[1:]):
        sys.exit(0)
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing an essay
    try:
        train()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except (*CONFIG_ERRORS, ValueError) as error:
        if wants_traceback:
            raise
        stop(error)


if __name__ == "__main__":
    main()
