"""Variants of the exchange alone: the collective library, and this project's symmetric memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import fused_ops
from launch.bench.settings import BenchSettings, as_list, check_counts
from launch.bench.shapes import TORCH_DTYPES, AllToAllShape, Shape
from launch.bench.variants import Candidate, Session, Variant


@dataclass
class Settings(BenchSettings):
    kib: Any = None  # sent by each rank, in KiB; default 16, 1024, 16384

    columns: ClassVar = {"cpu": ("baseline", "host"), "cuda": ("baseline", "cuda", "triton")}

    def check(self) -> None:
        super().check()
        check_counts(self, "kib")

    def shapes(self, link: str = "auto") -> Iterator[AllToAllShape]:
        for dtype, kib in itertools.product(as_list(self.dtype), as_list(self.kib) or [16, 1024, 16384]):
            yield AllToAllShape(kib, dtype)


def variants(session: Session, settings: Settings, shape: AllToAllShape) -> list[Variant]:
    dtype, columns = TORCH_DTYPES[shape.dtype], shape.columns(session.world)
    inputs = [
        torch.randn(session.world, columns, device=session.device).to(dtype)
        for _ in range(session.rotations(session.world * columns * dtype.itemsize))
    ]

    def variant(candidate: Candidate) -> Variant:
        def run(i: int) -> torch.Tensor:
            return fused_ops.all_to_all(inputs[i % len(inputs)], group=candidate.group, comm=candidate.backend)

        return Variant(candidate.backend, "forward", run, candidate.nccl_ctas, len(inputs))

    return [variant(candidate) for candidate in session.candidates(shape)]


def exchange(session: Session, shape: AllToAllShape, group: dist.ProcessGroup | None) -> Callable[[int], torch.Tensor]:
    return even_exchange(session, shape, group)


def even_exchange(session: Session, shape: Shape, group: dist.ProcessGroup | None) -> Callable[[int], torch.Tensor]:
    """The collective library's, of as many bytes as the shape's output has."""
    dtype = TORCH_DTYPES[shape.dtype]
    columns = max(1, shape.output_bytes // dtype.itemsize // session.world)
    data = torch.randn(session.world, columns, device=session.device).to(dtype)
    return lambda i: fused_ops.all_to_all(data, group=group, comm="baseline")
