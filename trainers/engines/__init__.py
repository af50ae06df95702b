"""How a model is spread over ranks and updated. One module an engine; the loop sees `Engine` alone."""

from __future__ import annotations

from trainers.config import RunConfig
from trainers.engines.base import Engine

KINDS = ("ddp",)

__all__ = ["KINDS", "Engine", "make_engine"]


def make_engine(config: RunConfig) -> Engine:
    """The engine that `engine.kind` names, over the default process group. ValueError for an unknown one."""
    if config.engine.kind == "ddp":
        from trainers.engines.ddp import DDPEngine

        return DDPEngine(config)
    raise ValueError(f"engine.kind is {config.engine.kind!r}; allowed: {', '.join(KINDS)}")
