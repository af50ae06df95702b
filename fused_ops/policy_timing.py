"""Times the backends of one call against each other, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from fused_ops import exposed

BATCH_MS = 2.0  # calls in a row are timed together, so that ranks which start apart count little
MOST_CALLS = 50
ROUNDS, ROUNDS_OF_SLOW = 9, 3
SLOW_MS = 50.0


def measure(runs: Mapping[str, Callable[[], object]], device: torch.device, estimate_ms: float) -> dict[str, float]:
    """Median milliseconds of each run on this rank, taken in turn. Collective: `estimate_ms` is equal on all ranks."""
    calls = min(MOST_CALLS, max(1, round(BATCH_MS / max(estimate_ms, 1e-3))))
    rounds = ROUNDS if estimate_ms < SLOW_MS else ROUNDS_OF_SLOW
    order = list(runs)
    for name in order:
        runs[name]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order:
            runs[name]()  # ranks begin the timed calls together
            times[name].append(mean_ms(runs[name], calls, device))
        order.reverse()
    return {name: statistics.median(values) for name, values in times.items()}


def mean_ms(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Milliseconds of one of `calls` calls in a row."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.current_stream(device))
        for _ in range(calls):
            run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return start.elapsed_time(end) / calls
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) * 1e3 / calls


@contextmanager
def outside_of_exposed_time() -> Iterator[None]:
    """Waits inside are a measurement's, not the step's."""
    before_ms = exposed.exposed_wait_ms()
    try:
        yield
    finally:
        exposed.exposed_wait_ms()
        exposed.add_ns(round(before_ms * 1e6))
