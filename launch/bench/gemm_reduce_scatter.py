"""GEMM + ReduceScatter of [M, K] x [N, K], K split over ranks as evenly as it goes; each rank keeps its part of the M rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops.backends.host.gemm_native import Product
from fused_ops.gemm_inputs import split_evenly
from launch.bench import gemm, torch_symmetric
from launch.bench.gemm import GemmSettings, GemmShape, Sizes, Ways
from launch.bench.limits import Traffic
from launch.bench.shapes import TORCH_DTYPES
from launch.bench.variants import Session, Variant


@dataclass(frozen=True)
class GemmReduceScatterShape(GemmShape):
    def sizes(self, rank: int, world: int) -> Sizes:
        inner = split_evenly(self.k, world)[rank]
        return Sizes(
            input=(self.m, inner),
            weight=(self.n, inner),
            output=(split_evenly(self.m, world)[rank], self.n),
            product=(self.m, inner),
            exchanged=((self.m, 0), (self.n, 0)),
        )

    def traffic(self, world: int) -> Traffic:
        """Each factor read once, each row of the output written on one rank. Partial sums may stay in caches."""
        itemsize = TORCH_DTYPES[self.dtype].itemsize
        return Traffic(
            read=(self.m + self.n) * self.k * itemsize,
            written=self.output_bytes,
            sent=(world - 1) * self.output_bytes,
            flops=2 * self.m * self.n * self.k,
        )


@dataclass
class Settings(GemmSettings):
    columns = gemm.columns(torch_symmetric.FUSED)
    shape = GemmReduceScatterShape


def variants(session: Session, settings: Settings, shape: GemmReduceScatterShape) -> list[Variant]:
    rival = torch_symmetric.gemm_reduce_scatter
    return gemm.variants(session, shape, Ways("gemm_reduce_scatter", _call, lambda g: Product(g).whole(), rival))


def exchange(session: Session, shape: GemmReduceScatterShape, group: dist.ProcessGroup | None) -> Callable[[int], Any]:
    return gemm.exchange(session, shape, _call, group)


def _call(input: Tensor, weight: Tensor, *, group: dist.ProcessGroup | None, comm: str) -> Tensor:
    return fused_ops.gemm_reduce_scatter(input, weight, group=group, comm=comm)
