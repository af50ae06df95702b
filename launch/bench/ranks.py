"""The ranks of a benchmark: processes that time every shape of the run and hand their rows over as they come."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException, spawn

import fused_ops
from launch.bench import operators
from launch.bench.settings import BenchSettings, as_list, shapes
from launch.bench.shapes import Shape
from launch.bench.variants import Session

GRACE_S = 2.0  # for a rank to end itself when asked to

Message = tuple[str, Any]  # ("ready", None) | ("note", text) | ("block", (position, rows))


class BenchError(RuntimeError):
    """Ranks failed or did not finish in time."""


def run_on_ranks(settings: BenchSettings, deliver: Callable[[Message], None]) -> None:
    """Start `settings.ranks` processes and `deliver` what rank 0 sends until all have ended.

    BenchError where a rank fails, or where nothing is heard for longer than `settings.timeout_s` allows. No process is
    left, whatever `deliver` raises.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()  # type: ignore[attr-defined]
    ranks = spawn(_rank_main, (settings, port, results), nprocs=settings.ranks, join=False)
    heard = time.monotonic()

    def hear() -> None:
        nonlocal heard
        while not results.empty():
            deliver(results.get())
            heard = time.monotonic()

    try:
        while not ranks.join(timeout=0.05):
            hear()
            if time.monotonic() - heard > settings.timeout_s + GRACE_S:
                raise BenchError(f"no word from the ranks for timeout_s={settings.timeout_s:g} s")
        hear()
    except ProcessException as error:
        hear()
        raise BenchError(str(error)) from error
    finally:
        for process in ranks.processes:
            process.terminate()
        for process in ranks.processes:
            process.join(GRACE_S)
            process.kill()
            process.join()


def _rank_main(rank: int, settings: BenchSettings, port: int, results: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    torch.set_num_threads(settings.threads)
    tell = results.put if rank == 0 else _say_nothing
    module = importlib.import_module(f"launch.bench.{'host' if settings.device == 'cpu' else 'cuda'}_session")
    session = module.make(settings, rank, f"tcp://127.0.0.1:{port}", tell)
    tell(("ready", None))
    build = operators.load(settings.op).variants
    for position, (link, shape) in session.in_order(positions(settings)):
        torch.manual_seed(settings.seed + rank)
        rows = _block(session, settings, link, shape, build)
        tell(("block", (position, rows)))
        gc.collect()
    dist.barrier()
    session.close()
    dist.destroy_process_group()


def positions(settings: BenchSettings) -> list[tuple[str, Shape]]:
    """(link, shape) of every block, in the order of the rows."""
    return [(link, shape) for link in as_list(settings.link) for shape in shapes(settings, link)]


def _block(session: Session, settings: BenchSettings, link: str, shape: Shape, build: Callable) -> list[dict[str, Any]]:
    session.begin(link, shape)
    variants = build(session, settings, shape)
    fused_ops.reset_counters()
    timings = session.measure(variants)
    kernels = "+".join(sorted({kind for (what, kind, _) in fused_ops.counters() if what == f"{settings.op}_kernels"}))
    limit = session.limit(shape, timings)
    facts = {**session.facts(), **asdict(shape)}
    return [
        {
            **facts,
            **asdict(timing),
            "kernels": kernels or None if timing.backend == "baseline" else None,  # fbgemm | torch
            "limit_ms": limit.ms if timing.phase == "forward" else None,
            "limit": limit.formula if timing.phase == "forward" else None,
        }
        for timing in timings
    ]


def _say_nothing(message: Message) -> None:
    """What ranks other than 0 do with their messages."""
