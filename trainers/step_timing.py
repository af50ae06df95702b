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

On the CPU the clock is the host's; the calls block, so host time is the time spent. On a GPU parts begin and end where its
compute stream does, so that a wait which the GPU's queued work covers is no wait, and one that starves it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

import fused_ops
from trainers.device import Mark, mark, milliseconds, reach

PARTS = ("data", "index_dist", "exposed")
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

    def __init__(self, device: torch.device | None = None, exchanges: Iterable[nn.Module] = ()) -> None:
        self._device = device or torch.device("cpu")
        self._parts: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in PARTS}
        self._paused: list[tuple[Mark, Mark]] = []
        self._begin = self._now()
        for exchange in exchanges:
            exchange.register_forward_pre_hook(self._exchange_starts)
            exchange.register_forward_hook(self._exchange_started)
        self._exchange_start = self._begin
        fused_ops.exposed_wait_ms()

    def _now(self) -> Mark:
        return mark(self._device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time inside to "data", "index_dist" or "exposed"."""
        start = self._now()
        try:
            yield
        finally:
            self._parts[name].append((start, self._now()))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside out of the step: evaluation, checkpoints."""
        begin, parts = self._now(), {name: list(intervals) for name, intervals in self._parts.items()}
        try:
            yield
        finally:
            self._paused.append((begin, self._now()))
            self._parts = parts
            fused_ops.exposed_wait_ms()

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around `loss.backward()`: what is left of it after its last computation is DDP waiting for gradients."""
        computed: list[Mark] = []

        def at_start(_: torch.Tensor) -> None:
            # Callbacks run in order when the graph is done, and DDP queues its own later than this.
            Variable._execution_engine.queue_callback(lambda: computed.append(self._now()))

        handle = loss.register_hook(at_start)
        yield
        handle.remove()
        self._parts["exposed"].append((computed[0], self._now()))

    def end_step(self) -> StepTimes:
        """The times since the last call (or since the timer was made), and a fresh start."""
        now = self._now()
        reach(now)
        step = milliseconds(self._begin, now) - _total(self._paused)
        data, index, exposed = (_total(self._parts[name]) for name in PARTS)
        exposed += fused_ops.exposed_wait_ms()
        self._parts, self._paused, self._begin = {name: [] for name in PARTS}, [], now
        return StepTimes(step, data, index, exposed, step - data - index - exposed)

    def _exchange_starts(self, module: nn.Module, args: Any) -> None:
        self._exchange_start = self._now()

    def _exchange_started(self, module: nn.Module, args: Any, awaitable: Any) -> Any:
        self._parts["exposed"].append((self._exchange_start, self._now()))
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
        start = self._begin

        def before(_: Any) -> None:
            nonlocal start
            start = self._now()

        def after(_: Any, __: Any) -> None:
            self._parts["exposed"].append((start, self._now()))

        node.register_prehook(before)
        node.register_hook(after)


def _total(intervals: list[tuple[Mark, Mark]]) -> float:
    return sum(milliseconds(start, end) for start, end in intervals)
