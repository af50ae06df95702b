"""GEMM + AllReduce of [M, K] x [N, K], K split over ranks as evenly as it goes."""

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
class GemmAllReduceShape(GemmShape):
    def sizes(self, rank: int, world: int) -> Sizes:
        inner = split_evenly(self.k, world)[rank]
        return Sizes(
            input=(self.m, inner),
            weight=(self.n, inner),
            output=(self.m, self.n),
            product=(self.m, inner),
            exchanged=((self.m, 0), (self.n, 0)),
        )

    def traffic(self, world: int) -> Traffic:
        """Each factor read once, the output written on each rank. Sent in two phases, the least there is; partial sums
        may stay in caches."""
        itemsize = TORCH_DTYPES[self.dtype].itemsize
        return Traffic(
            read=(self.m + self.n) * self.k * itemsize,
            written=world * self.output_bytes,
            sent=2 * (world - 1) * self.output_bytes,
            flops=2 * self.m * self.n * self.k,
        )


@dataclass
class Settings(GemmSettings):
    columns = gemm.columns(torch_symmetric.ONE_SHOT, torch_symmetric.TWO_SHOT)
    shape = GemmAllReduceShape


def variants(session: Session, settings: Settings, shape: GemmAllReduceShape) -> list[Variant]:
    rival = torch_symmetric.gemm_all_reduce
    return gemm.variants(session, shape, Ways("gemm_all_reduce", _call, lambda g: Product(g).whole(), rival))


def exchange(session: Session, shape: GemmAllReduceShape, group: dist.ProcessGroup | None) -> Callable[[int], Any]:
    return gemm.exchange(session, shape, _call, group)


def _call(input: Tensor, weight: Tensor, *, group: dist.ProcessGroup | None, comm: str) -> Tensor:
    return fused_ops.gemm_all_reduce(input, weight, group=group, comm=comm)
