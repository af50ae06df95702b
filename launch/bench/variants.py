"""What is timed and what comes of it: the words that the sessions and the operators' files share."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from launch.bench.limits import Limit
from launch.bench.shapes import Shape

USES_LIBRARY = ("baseline", "auto")  # columns that call the collective library
MOST_INPUTS = 32


@dataclass(frozen=True)
class Variant:
    """One thing to time. `run(i)` is its i-th call, on the i-th of the rotated inputs."""

    backend: str  # baseline | baseline_<another rival> | unfused | host | cuda | triton | auto
    phase: str  # forward | forward_backward | compute_alone | exchange_alone
    run: Callable[[int], Any]
    nccl_ctas: int | None = None  # CTAs of the NCCL communicator that it uses
    inputs: int = 1  # distinct ones


@dataclass(frozen=True)
class Timing:
    backend: str
    phase: str
    ms: float
    p10_ms: float
    p90_ms: float
    captured: bool = False  # replayed as a CUDA graph
    why_not_captured: str | None = None
    nccl_max_ctas: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A backend that may be timed, and the group its ranks talk in."""

    backend: str
    group: dist.ProcessGroup | None = None
    nccl_ctas: int | None = None


def exists(backend: str, operator: str) -> bool:
    """Whether that backend has that operator."""
    try:
        return importlib.util.find_spec(f"fused_ops.backends.{backend}.{operator}") is not None
    except ModuleNotFoundError:  # nor any other
        return False


def inputs_beyond(cache_bytes: int, touched_bytes: int, least: int) -> int:
    """How many distinct inputs fill that cache twice, where a call of all who share it touches so many bytes; at most
    MOST_INPUTS."""
    return max(least, min(MOST_INPUTS, math.ceil(2 * cache_bytes / max(1, touched_bytes))))


class Session(Protocol):
    """What a rank has for the whole run: its device, groups and memory, and the way its calls are timed."""

    rank: int
    world: int
    device: torch.device

    def in_order(self, blocks: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """(position, (link, shape)) of every block, in the order that suits the memory."""

    def begin(self, link: str, shape: Shape) -> None:
        """From here on it is about that shape, over that link."""

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        """The backends to time on the shape."""

    def rotations(self, touched_bytes: int) -> int:
        """How many distinct inputs the calls of a variant go through, of which each touches so many bytes (the same number on
        every rank: ranks replay as many calls)."""

    def tables(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """That many random table elements, 1-D, in one storage."""

    def leave_out(self, backend: str, reason: str) -> None:
        """Say why there is no row of it."""

    def measure(self, variants: Sequence[Variant]) -> list[Timing]:
        """Time them interleaved, the slowest rank's time counting. Collective."""

    def limit(self, shape: Shape, timings: Sequence[Timing]) -> Limit:
        """The least time that a forward can take. Collective."""

    def facts(self) -> dict[str, Any]:
        """What the rows say of the session: link, and on GPUs more."""

    def close(self) -> None:
        """Let go of what the process group's end must not find."""


def quantiles(times: torch.Tensor) -> list[tuple[float, float, float]]:
    """(median, 10th, 90th percentile) of each row of [variants, rounds]; NaN marks rounds a variant did not take."""
    found = []
    for row in times:
        taken = row[~row.isnan()]
        points = (
            torch.quantile(taken, torch.tensor([0.5, 0.1, 0.9], dtype=taken.dtype)) if len(taken) else [math.nan] * 3
        )
        found.append(tuple(float(point) for point in points))
    return found  # type: ignore[return-value]
