"""Run variants of an operator on several ranks, interleaved, and keep the medians.

One iteration is timed on every rank between two barriers' worth of agreement: all ranks start together, and the slowest
rank's time counts, since a collective is done when the last rank has its result.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from launch.bench.settings import BenchSettings


@dataclass(frozen=True)
class Variant:
    """One thing to time. `run(i)` is its i-th call, on the i-th of the rotated inputs."""

    backend: str  # baseline | unfused | host
    phase: str  # forward | forward_backward | compute_alone | exchange_alone
    run: Callable[[int], Any]
    limit_ms: float | None = None


@dataclass(frozen=True)
class Timing:
    backend: str
    phase: str
    ms: float
    p10_ms: float
    p90_ms: float
    limit_ms: float | None


Build = Callable[[BenchSettings, dict[str, int]], list[Variant]]


def run_on_ranks(settings: BenchSettings, shape: dict[str, int], build: Build) -> list[Timing]:
    """Start `settings.ranks` processes, time `build`'s variants on that shape, return rank 0's medians."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (settings.ranks, port, settings, shape, build, results)
    multiprocessing.spawn(_rank_main, arguments, nprocs=settings.ranks)  # type: ignore[attr-defined]
    return [Timing(**row) for row in results.get()]


def _rank_main(rank: int, world: int, port: int, settings: BenchSettings, shape: dict, build: Build, results) -> None:  # type: ignore[no-untyped-def]
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed + rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    variants = build(settings, shape)
    timings = measure(settings, variants)
    if rank == 0:
        results.put([dataclasses.asdict(t) for t in timings])
    del variants
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: BenchSettings, variants: list[Variant]) -> list[Timing]:
    times: list[list[float]] = [[] for _ in variants]
    call = 0
    gc.disable()  # a collection in the middle of one variant is not its cost
    for variant in variants:
        for i in range(settings.warmup):
            variant.run(i)
    for _ in range(settings.rounds):
        for n, variant in enumerate(variants):
            variant.run(call)  # one unmeasured call takes the cache state from the previous variant to this one's
            for _ in range(settings.iterations):
                call += 1
                dist.barrier()
                start = time.perf_counter()
                variant.run(call)
                times[n].append((time.perf_counter() - start) * 1e3)
        gc.collect()
    gc.enable()
    table = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    quantiles = torch.quantile(table, torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64), dim=1).T.tolist()
    return [
        Timing(v.backend, v.phase, median, p10, p90, v.limit_ms)
        for v, (median, p10, p90) in zip(variants, quantiles, strict=True)
    ]


def stream_rate(read: bool = True, mib: int = 256) -> float:
    """Bytes a second that this rank moves through memory while all ranks do: reading, or copying (read + written)."""
    source = torch.ones(mib << 18, dtype=torch.float32)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(4):
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
