"""Prints what a run would be: its resolved config, parameter count, bytes a rank and how it is split. One module a family."""

from __future__ import annotations

import dataclasses
import importlib

import yaml
from rich.console import Console

from trainers.config import RunConfig


def report(config: RunConfig, world: int) -> None:
    """Prints to stdout. Needs no process group and no memory for the model. ConfigError where it cannot be split so."""
    console = Console(width=120, highlight=False)
    console.print(_yaml(config), markup=False)
    importlib.import_module(f"launch.dry_run.{config.model.family}").report(config, world, console)


def _yaml(config: RunConfig) -> str:
    class InlineLists(yaml.SafeDumper):
        pass

    InlineLists.add_representer(list, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True))
    keys = dataclasses.asdict(config)
    del keys["run_dir"]  # nothing is written
    return yaml.dump(keys, Dumper=InlineLists, sort_keys=False, width=110)
