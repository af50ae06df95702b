"""AllGather + GEMM of [M, K] x [N, K]: M split over ranks as evenly as it goes, and N."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops.backends.host.gemm_native import linear
from fused_ops.gemm_inputs import split_evenly
from launch.bench import gemm, torch_symmetric
from launch.bench.gemm import GemmSettings, GemmShape, Sizes, Ways
from launch.bench.limits import Traffic
from launch.bench.shapes import TORCH_DTYPES
from launch.bench.variants import Session, Variant


@dataclass(frozen=True)
class AllGatherGemmShape(GemmShape):
    def sizes(self, rank: int, world: int) -> Sizes:
        rows, columns = split_evenly(self.m, world)[rank], split_evenly(self.n, world)[rank]
        return Sizes(
            input=(rows, self.k),
            weight=(columns, self.k),
            output=(self.m, columns),
            product=(self.m, self.k),
            exchanged=((rows, self.k), (0, self.k)),
        )

    def traffic(self, world: int) -> Traffic:
        """Each weight and each row of the input read once, the output written. Gathered rows may stay in caches."""
        itemsize = TORCH_DTYPES[self.dtype].itemsize
        return Traffic(
            read=(self.m + self.n) * self.k * itemsize,
            written=self.output_bytes,
            sent=(world - 1) * self.m * self.k * itemsize,
            flops=2 * self.m * self.n * self.k,
        )


@dataclass
class Settings(GemmSettings):
    columns = gemm.columns(torch_symmetric.FUSED)
    shape = AllGatherGemmShape


def variants(session: Session, settings: Settings, shape: AllGatherGemmShape) -> list[Variant]:
    rival = functools.partial(torch_symmetric.all_gather_gemm, total_rows=shape.m)
    return gemm.variants(session, shape, Ways("all_gather_gemm", _call(shape), linear, rival))


def exchange(session: Session, shape: AllGatherGemmShape, group: dist.ProcessGroup | None) -> Callable[[int], Any]:
    return gemm.exchange(session, shape, _call(shape), group)


def _call(shape: AllGatherGemmShape) -> gemm.Call:
    def call(input: Tensor, weight: Tensor, *, group: dist.ProcessGroup | None, comm: str) -> Tensor:
        output = fused_ops.all_gather_gemm(input, weight, total_rows=shape.m, group=group, comm=comm)
        assert isinstance(output, Tensor)
        return output

    return call
