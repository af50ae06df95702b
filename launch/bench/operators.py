"""The operators that can be timed: each has a file here, and brings its settings, its shapes and its variants in it.

A file `<operator>.py` has
    Settings        a BenchSettings with the keys of its shapes, `columns`, `check` and `shapes`
    variants(session, settings, shape) -> list[Variant]     what is timed on a shape
    exchange(session, shape, group) -> Callable[[int], Any]  the collective of its baseline alone, in that group
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch.distributed as dist

    from launch.bench.settings import BenchSettings
    from launch.bench.shapes import Shape
    from launch.bench.variants import Session, Variant

OPERATORS = ("all_to_all", "embedding_all_to_all", "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")


class Operator(Protocol):
    """An operator's file."""

    Settings: type[BenchSettings]

    def variants(self, session: Session, settings: Any, shape: Any) -> list[Variant]: ...

    def exchange(self, session: Session, shape: Shape, group: dist.ProcessGroup | None) -> Callable[[int], Any]: ...


def load(name: str) -> Operator:
    return cast(Operator, importlib.import_module(f"launch.bench.{name}"))
