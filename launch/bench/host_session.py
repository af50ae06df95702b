"""Timing on CPU ranks: wall clock around single calls.

One iteration is timed on every rank after a barrier: all ranks start together, and the slowest rank's time counts, since a
collective is done when the last rank has its result.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fused_ops
from launch.bench import limits
from launch.bench.settings import BenchSettings, backends
from launch.bench.shapes import TORCH_DTYPES, Shape
from launch.bench.variants import Candidate, Timing, Variant, inputs_beyond, quantiles

PRODUCT_SIZE = 1024  # rows, columns and inner size of the product that FLOPs are measured with


class HostSession:
    def __init__(self, settings: BenchSettings, rank: int, address: str) -> None:
        self.settings, self.rank, self.world = settings, rank, settings.ranks
        self.device = torch.device("cpu")
        timeout = timedelta(seconds=settings.timeout_s)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=self.world, timeout=timeout)
        fused_ops.set_timeout(settings.timeout_s)

    def in_order(self, blocks: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        return enumerate(blocks)

    def begin(self, link: str, shape: Shape) -> None:
        """Nothing is kept from shape to shape."""

    def candidates(self, shape: Shape) -> list[Candidate]:
        return [Candidate(backend) for backend in backends(self.settings)]

    def rotations(self, touched_bytes: int) -> int:
        return inputs_beyond(cache_bytes(), touched_bytes * self.world, self.settings.rotate)

    def tables(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(elements).to(dtype)

    def leave_out(self, backend: str, reason: str) -> None:
        raise AssertionError(f"{backend} {reason}")  # every host backend can be timed

    def facts(self) -> dict[str, Any]:
        return {"link": "CPU host"}

    def measure(self, variants: Sequence[Variant]) -> list[Timing]:
        times: list[list[float]] = [[] for _ in variants]
        call = 0
        gc.disable()  # a collection in the middle of one variant is not its cost
        for variant in variants:
            for i in range(self.settings.warmup):
                variant.run(i)
        for _ in range(self.settings.rounds):
            for n, variant in enumerate(variants):
                variant.run(call)  # one unmeasured call takes the cache state from the previous variant to this one's
                for _ in range(self.settings.iterations):
                    call += 1
                    dist.barrier()
                    start = time.perf_counter()
                    variant.run(call)
                    times[n].append((time.perf_counter() - start) * 1e3)
            gc.collect()
        gc.enable()
        table = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [Timing(v.backend, v.phase, *points) for v, points in zip(variants, quantiles(table), strict=True)]

    def limit(self, shape: Shape, timings: Sequence[Timing]) -> limits.Limit:
        share = shape.traffic(self.world).share(self.world)
        flops = product_rate(TORCH_DTYPES[shape.dtype]) if share.flops else None
        return limits.of_host_memory(share, stream_rate(read=True), stream_rate(read=False), flops)

    def close(self) -> None:
        """The group is the caller's to end."""


def make(settings: BenchSettings, rank: int, address: str, tell: object) -> HostSession:
    return HostSession(settings, rank, address)


@functools.cache
def stream_rate(read: bool = True, mib: int = 256) -> float:
    """Bytes a second that this rank moves through memory while all ranks do: reading, or copying (read + written). Measured
    once, collectively."""
    source = torch.ones(mib << 18, dtype=torch.float32)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        if read:
            source.sum()
        else:
            target.copy_(source)
        seconds = time.perf_counter() - start
        best = max(best, (1 if read else 2) * source.numel() * 4 / seconds)
    rate = torch.tensor(best)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    return rate.item()


@functools.cache
def product_rate(dtype: torch.dtype) -> float:
    """FLOPs a second of a large matrix product on this rank while all ranks compute one. Measured once, collectively."""
    one, other = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        torch.mm(one, other)
        best = max(best, 2 * PRODUCT_SIZE**3 / (time.perf_counter() - start))
    rate = torch.tensor(best)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    return rate.item()


@functools.cache
def cache_bytes() -> int:
    """Of the last-level cache; 0 where Linux does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units), default=0)
