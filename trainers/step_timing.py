"""Where the milliseconds of a step go.

    step_ms = data_ms + index_dist_ms + exposed_comm_ms + compute_ms

data_ms           waiting for the loader's next batch
index_dist_ms     starting, and waiting for, the distribution of indices
exposed_comm_ms   waiting for a collective while none of the step's compute runs (below)
compute_ms        the rest

Exposed communication is one quantity under every `comm`: the time in which this rank's thread is inside a collective's
call or wait and computes nothing of its own. Three sources add up to it:

- the pooled exchange. Unfused: the calls that start it and the waits that end it, forward and backward, with the copies
  the collective library makes there (packing, unpacking). What runs behind it between start and wait is not counted.
  Fused: the time the operator's waits lasted beyond its own compute, as the operator measures it;
- the tail of the dense gradients' all-reduce: from the end of the last backward computation to DDP's return;
- whatever the loop itself waits for (the losses of the other ranks).

On the CPU the clock is the host's; the calls block, so host time is the time spent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

import fused_ops

EXCHANGE_NODES = ("All2All_Pooled_WaitBackward", "All2All_Pooled_ReqBackward")


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step."""

    step_ms: float
    data_ms: float
    index_dist_ms: float
    exposed_comm_ms: float
    compute_ms: float


class StepTimer:
    """Accumulates the parts of a step. `exchanges`: modules that start an unfused pooled exchange."""

    def __init__(self, exchanges: Iterable[nn.Module] = ()) -> None:
        self._parts = {"data": 0.0, "index_dist": 0.0, "exposed": 0.0}
        self._paused = 0.0
        self._begin = time.perf_counter()
        for exchange in exchanges:
            exchange.register_forward_pre_hook(self._exchange_starts)
            exchange.register_forward_hook(self._exchange_started)
        self._exchange_start = 0.0
        fused_ops.exposed_wait_ms()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time inside to "data", "index_dist" or "exposed"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside out of the step: evaluation, checkpoints."""
        begin, parts = time.perf_counter(), dict(self._parts)
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin
            self._parts = parts
            fused_ops.exposed_wait_ms()

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around `loss.backward()`: what is left of it after its last computation is DDP waiting for gradients."""
        computed: list[float] = []

        def at_start(_: torch.Tensor) -> None:
            # Callbacks run in order when the graph is done, and DDP queues its own later than this.
            Variable._execution_engine.queue_callback(lambda: computed.append(time.perf_counter()))

        handle = loss.register_hook(at_start)
        yield
        handle.remove()
        self._parts["exposed"] += time.perf_counter() - computed[0]

    def end_step(self) -> StepTimes:
        """The times since the last call (or since the timer was made), and a fresh start."""
        now = time.perf_counter()
        step = (now - self._begin - self._paused) * 1e3
        data, index, exposed = (self._parts[name] * 1e3 for name in ("data", "index_dist", "exposed"))
        exposed += fused_ops.exposed_wait_ms()
        self._parts, self._paused, self._begin = dict.fromkeys(self._parts, 0.0), 0.0, now
        return StepTimes(step, data, index, exposed, step - data - index - exposed)

    def _exchange_starts(self, module: nn.Module, args: Any) -> None:
        self._exchange_start = time.perf_counter()

    def _exchange_started(self, module: nn.Module, args: Any, awaitable: Any) -> Any:
        self._parts["exposed"] += time.perf_counter() - self._exchange_start
        wait = awaitable.wait

        def timed_wait() -> torch.Tensor:
            with self.part("exposed"):
                pooled = wait()
            self._time_backward(pooled)
            return pooled

        awaitable.wait = timed_wait
        return awaitable

    def _time_backward(self, pooled: torch.Tensor) -> None:
        """Hooks the two autograd nodes that start and end the exchange of gradients."""
        node, found = pooled.grad_fn, 0
        while node is not None and found < len(EXCHANGE_NODES):
            if node.name() in EXCHANGE_NODES:
                found += 1
                self._time_node(node)
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            node = parents[-1] if parents else None
        if pooled.grad_fn is not None and found < len(EXCHANGE_NODES) and dist.get_world_size() > 1:
            raise RuntimeError(
                f"this TorchRec's pooled exchange has no autograd nodes {' and '.join(EXCHANGE_NODES)}: its backward would "
                "be timed as compute; EXCHANGE_NODES in trainers/step_timing.py needs their new names"
            )

    def _time_node(self, node: torch.autograd.graph.Node) -> None:
        start = 0.0

        def before(_: Any) -> None:
            nonlocal start
            start = time.perf_counter()

        def after(_: Any, __: Any) -> None:
            self._parts["exposed"] += time.perf_counter() - start

        node.register_prehook(before)
        node.register_hook(after)
