"""Model families: what differs between a DLRM and a Transformer, each in a package of its own.

A family's package `trainers.<family>` has
    config.py     its `model=` and `data=` dataclasses, MODEL and DATA (by `data.kind`), and which fused operators it calls
    rules.py      RULES, CHOICES, AT_LEAST: what these dataclasses' types cannot say
    batches.py    build_batches, data_info: from config to batches
    an engine a kind (`trainers.engine.Engine`), which ENGINES in config.py names
A new family is a new package, and its name in FAMILIES. Nothing here imports torch before an engine is made.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config import DataConfig, ModelConfig, RunConfig
    from trainers.engine import Engine

FAMILIES = ("dlrm", "transformer")


def part(family: str, name: str) -> ModuleType:
    """Module `name` of a family's package. ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"model.family={family} is not a choice (allowed: {', '.join(FAMILIES)})")
    return importlib.import_module(f"trainers.{family}.{name}")


def model_schema(family: str) -> type[ModelConfig]:
    return part(family, "config").MODEL


def data_schemas() -> dict[str, type[DataConfig]]:
    """`data.kind` -> its dataclass, of all families."""
    return {kind: schema for family in FAMILIES for kind, schema in part(family, "config").DATA.items()}


def operators(family: str) -> tuple[str, ...]:
    """Fused operators that the family's models call."""
    return part(family, "config").OPERATORS


def engines(family: str) -> dict[str, str]:
    """`engine.kind` -> "module:class"."""
    return part(family, "config").ENGINES


def make_engine(config: RunConfig) -> Engine:
    """The engine that `model.family` and `engine.kind` name, over the default process group. ValueError for an unknown one."""
    known = engines(config.model.family)
    if config.engine.kind not in known:
        raise ValueError(
            f"engine.kind={config.engine.kind} does not train a {config.model.family}; allowed: {', '.join(known)}"
        )
    module, name = known[config.engine.kind].split(":")
    return getattr(importlib.import_module(module), name)(config)


def batches(config: RunConfig) -> Any:
    """The module with the family's `build_batches` and `data_info`."""
    return part(config.model.family, "batches")
