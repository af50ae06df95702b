"""Where a decode step's time goes: products with the weights (GEMV), communication that nothing hides, and the rest.

The parts are disjoint and add up to the step. All are this rank's; its communication has in it the time for which it waits for
slower ranks.

| | on a CPU | on a GPU |
|---|---|---|
| step | wall-clock time | time from one replay's end to the next one's (the step is a CUDA graph) |
| gemv | time inside the linears' products, waits left out | kernels that multiply by a weight, but for fused ones' waits |
| communication | `fused_ops.exposed_wait_ms` (below) | kernels of the collective library, and fused kernels' waits |
| rest | the remainder: attention, norms, choosing, Python | the remainder, gaps between kernels with it |

`exposed_wait_ms` is the waits of fused operators, and the whole of collectives that nothing is fused into (the embedding's, the
logits', all of `comm=baseline`). Kernels are told apart by their names, in torch's profile of as
many replays more, since a profile slows them down.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_ops
from models.parallel.linear import ColumnParallelLinear, RowParallelLinear
from models.transformer.decoder import Decoder
from models.transformer.generation import Clock, own_stream
from models.transformer.generation_inputs import check
from models.transformer.model import Transformer

WARM_UP_STEPS = 2

# Names of cuBLAS, CUTLASS and the fused operators (the last two: in Triton). Attention in CUTLASS is named after it too.
NOT_A_PRODUCT = re.compile(r"fmha|flash|attention", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|dot_kernel|one_phase_kernel|partial_sums_kernel", re.IGNORECASE
)
COLLECTIVE = re.compile(r"nccl|one_shot|two_shot|multimem|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)


@dataclass(frozen=True)
class StepSplit:
    """Means of `steps` decode steps of this rank, in milliseconds; step = gemv + communication + rest."""

    step_ms: float
    gemv_ms: float
    communication_ms: float
    rest_ms: float
    steps: int

    @classmethod
    def of(cls, step: float, gemv: float, communication: float, steps: int) -> StepSplit:
        """Of sums over all steps."""
        rest = max(0.0, step - gemv - communication)  # profiled kernels may come to more than the timed replays took
        return cls(step / steps, gemv / steps, communication / steps, rest / steps, steps)


def split_step(model: Transformer, prompts: Sequence[Sequence[int]], *, steps: int = 16) -> StepSplit:
    """Decode `steps` greedy tokens after `prompts` and say where the time went. Collective; raises as `generate` does."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    device = model.embedding.weight.device
    lists = [[int(token) for token in prompt] for prompt in prompts]
    tokens = 1 + WARM_UP_STEPS + _rounds(model) * steps
    sampling, graph = check(model, lists, tokens, None, (0.0, None, None, 0), "auto")
    if not graph:
        return _on_host(Decoder(model, lists, tokens, sampling, None, static=False), steps)
    with own_stream(device):
        return _on_gpu(Decoder(model, lists, tokens, sampling, None, static=True), steps)


def steps_that_fit(model: Transformer, prompts: Sequence[Sequence[int]]) -> int | None:
    """The most `steps` for which a model with learned positions has any left; None where it has no such limit."""
    if model.positions is None:
        return None
    room = model.config.max_length - max(map(len, prompts))  # for what is fed; the last token is not
    return max(0, (room - WARM_UP_STEPS) // _rounds(model))


def _rounds(model: Transformer) -> int:
    """How often the steps run: on a GPU timed, then profiled."""
    return 2 if model.embedding.weight.is_cuda else 1


def _on_host(decoder: Decoder, steps: int) -> StepSplit:
    decoder.prefill()
    for _ in range(WARM_UP_STEPS):
        decoder.step()
    with _product_time(decoder.model) as products:
        fused_ops.exposed_wait_ms()  # of earlier work
        start = time.perf_counter()
        for _ in range(steps):
            decoder.step()
        step_ms = (time.perf_counter() - start) * 1e3
    return StepSplit.of(step_ms, products.ms, products.exposed_ms + fused_ops.exposed_wait_ms(), steps)


class _Products:
    """ms: inside the products so far, waits left out. exposed_ms: those waits, and all before a product."""

    def __init__(self) -> None:
        self.ms = self.exposed_ms = self._start = 0.0

    def begin(self, *_: Any) -> None:
        self.exposed_ms += fused_ops.exposed_wait_ms()
        self._start = time.perf_counter()

    def end(self, *_: Any) -> None:
        inside = (time.perf_counter() - self._start) * 1e3
        waited = fused_ops.exposed_wait_ms()
        self.ms += inside - waited
        self.exposed_ms += waited


@contextmanager
def _product_time(model: Transformer) -> Iterator[_Products]:
    """Times every linear of `model`, and its output, which is a product without a module."""
    products = _Products()
    linears = [m for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    handles = [linear.register_forward_pre_hook(products.begin) for linear in linears]
    handles += [linear.register_forward_hook(products.end) for linear in linears]
    output = model._local_logits

    def timed(*args: Any) -> Tensor:
        products.begin()
        logits = output(*args)
        products.end()
        return logits

    model._local_logits = timed  # type: ignore[assignment, method-assign]
    try:
        yield products
    finally:
        del model._local_logits  # the class's shows again
        for handle in handles:
            handle.remove()


def _on_gpu(decoder: Decoder, steps: int) -> StepSplit:
    decoder.prefill()
    replay = decoder.capture()
    for _ in range(WARM_UP_STEPS):
        replay()
    clock = Clock(decoder.next.device)
    for _ in range(steps):
        replay()
        clock.tick()
    step_ms = sum(clock.milliseconds())
    _kernel_waits_ms(decoder)  # of earlier work
    # Collectives in a graph are not among the waits, so no time is counted twice.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            replay()
        torch.cuda.synchronize(decoder.next.device)
    waited_ms = _kernel_waits_ms(decoder)
    spent = {"gemv": 0.0, "communication": 0.0, "rest": 0.0}
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[kernel_kind(event.name)] += event.time_range.elapsed_us() / 1e3
    return StepSplit.of(step_ms, spent["gemv"] - waited_ms, spent["communication"] + waited_ms, steps)


def _kernel_waits_ms(decoder: Decoder) -> float:
    """Since the last call; the stream has passed."""
    if decoder.model.tp.group is not None:
        fused_ops.check_errors(decoder.model.tp.group)  # which takes in what kernels have recorded
    return fused_ops.exposed_wait_ms()


def kernel_kind(name: str) -> str:
    """gemv, communication or rest, by a GPU kernel's name. A fused operator's kernel, whose name has both, is gemv."""
    if NOT_A_PRODUCT.search(name):
        return "rest"
    if PRODUCT.search(name):
        return "gemv"
    return "communication" if COLLECTIVE.search(name) else "rest"
