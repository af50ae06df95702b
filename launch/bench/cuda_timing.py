"""Timing on GPU ranks: CUDA events around replays of a graph that holds one call for each of the rotated inputs.

Before each block of replays the ranks meet on the device: all start together, whatever their interpreters do. Per round the
slowest rank's time counts, since a collective is done when the last rank has its result; then medians over the rounds.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launch.bench.cuda_graphs import capture
from launch.bench.variants import Timing, Variant, quantiles

LEAST_ROUNDS = 3
HEAD_START_CYCLES = 400_000  # of a spinning kernel (0.2 ms): what follows it is queued by the time it ends


@dataclass
class Prepared:
    """A variant that is ready to be timed: `replay` runs `calls` calls of it."""

    variant: Variant
    replay: Callable[[], Any]
    calls: int
    why_not_captured: str | None


class CudaTimer:
    """`meet`: enqueues a meeting of all ranks on the current stream."""

    def __init__(
        self, meet: Callable[[], Any], rounds: int, warmup: int, iterations: int, graph: bool, budget_s: float
    ):
        self.meet, self.rounds, self.warmup, self.iterations, self.graph = meet, rounds, warmup, iterations, graph
        self.budget_ms = budget_s * 1e3
        self.stream = torch.cuda.Stream()

    def measure(self, variants: Sequence[Variant], most_rounds: int | None = None) -> list[Timing]:
        """Time them interleaved. Collective."""
        pool = torch.cuda.graph_pool_handle()
        gc.disable()
        try:
            prepared = [self._prepare(variant, pool) for variant in variants]
            replay_ms = self._slowest([self._block(p, 1) * p.calls for p in prepared])
            share = self.budget_ms / max(1, len(prepared))
            plans = [
                plan(ms, share, round(self.iterations / p.calls), most_rounds or self.rounds)
                for ms, p in zip(replay_ms, prepared, strict=True)
            ]
            times = torch.full((len(prepared), most_rounds or self.rounds), math.nan, dtype=torch.float64)
            for turn in range(times.shape[1]):
                for n, (repeats, rounds) in enumerate(plans):
                    if turn < rounds:
                        times[n, turn] = self._block(prepared[n], repeats)
        finally:
            gc.enable()
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return [
            Timing(
                p.variant.backend,
                p.variant.phase,
                *points,
                captured=self.graph and p.why_not_captured is None,
                why_not_captured=p.why_not_captured,
                nccl_max_ctas=p.variant.nccl_ctas,
            )
            for p, points in zip(prepared, quantiles(times), strict=True)
        ]

    def _prepare(self, variant: Variant, pool: Any) -> Prepared:
        calls = variant.inputs

        def plain() -> None:
            for i in range(calls):
                variant.run(i)

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for i in range(max(self.warmup, 2)):
                variant.run(i)
        torch.cuda.synchronize()
        if not self.graph:
            return Prepared(variant, plain, calls, None)
        dist.barrier()
        graph = capture(variant.run, calls, self.stream, pool)
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, graph if isinstance(graph, str) else None)
        problem = next((f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason), None)
        if problem is not None or isinstance(graph, str):
            return Prepared(variant, plain, calls, problem)
        return Prepared(variant, graph.replay, calls, None)

    def _block(self, prepared: Prepared, repeats: int) -> float:
        """Milliseconds a call, on this rank, over so many replays."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(HEAD_START_CYCLES)
            self.meet()
            start.record()
            for _ in range(repeats):
                prepared.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / (repeats * prepared.calls)

    @staticmethod
    def _slowest(times: list[float]) -> list[float]:
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()


def plan(replay_ms: float, share_ms: float, repeats: int, rounds: int) -> tuple[int, int]:
    """(replays a block, blocks) for a variant: as wanted where that stays in its share of the budget, else fewer replays,
    then fewer blocks, down to one and LEAST_ROUNDS."""
    affordable = int(share_ms / max(replay_ms, 1e-6))
    repeats = max(1, min(repeats, affordable // min(rounds, LEAST_ROUNDS)))
    return repeats, min(rounds, max(LEAST_ROUNDS, affordable // repeats))
