"""Token generation: the prompts at once, then one token a sequence and step, from a KV cache.

A step of B sequences multiplies B rows with every weight. At B of 1 to 64 that takes as long as reading the weights does; what
is left are the all-reduces that wait for it, two a layer, and those are what the fused operators are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import fused_ops
from models.transformer.decoder import Decoder
from models.transformer.generation_inputs import check
from models.transformer.model import Transformer

LOOK_EVERY = 8  # steps on a GPU between looks at what they have found, each of which waits for it


@dataclass(frozen=True)
class Generated:
    """tokens: the new tokens of each prompt, up to and with the stop token; the same on all ranks.

    prefill_ms: all prompts, and the first token of each. step_ms: of every later step, one token for every sequence.
    cuda_graph: the steps were replays of one.
    """

    tokens: list[list[int]]
    prefill_ms: float
    step_ms: list[float]
    cuda_graph: bool


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cuda_graph: bool | str = "auto",
) -> Generated:
    """Up to `max_new_tokens` more tokens for each prompt; collective over the model's ranks, all of which pass the same.

    prompts: token ids, of any lengths but 0. stop_token: a sequence ends with it; all ends when every sequence has.
    temperature, top_k, top_p, seed: see `Sampling`.
    use_cuda_graph: every step one launch; "auto" = on a GPU. Capturing takes a few steps' time, which is in no figure.

    Raises ValueError, on all ranks, for what any of them refuses or where they were given different things;
    FloatingPointError for logits that are not finite; and what the fused operators raise for peers that are late or lost.
    """
    lists = [[int(token) for token in prompt] for prompt in prompts]
    sampling, graph = check(model, lists, max_new_tokens, stop_token, (temperature, top_k, top_p, seed), use_cuda_graph)
    graph = graph and max_new_tokens > 1  # else there is no step to capture
    device = model.embedding.weight.device
    with own_stream(device) if graph else nullcontext():
        decoder = Decoder(model, lists, max_new_tokens, sampling, stop_token, static=graph)
        clock = Clock(device)
        decoder.prefill()
        clock.tick()
        [prefill_ms] = clock.milliseconds()
        _raise_what_went_wrong(decoder)
        step = decoder.capture() if graph else decoder.step
        clock = Clock(device)
        _decode(decoder, step, max_new_tokens - 1, clock)
        step_ms = clock.milliseconds()
        rows = decoder.generated[:, : 1 + len(step_ms)].tolist()
    return Generated([_cut(row, stop_token) for row in rows], prefill_ms, step_ms, graph)


def _decode(decoder: Decoder, step: Callable[[], None], steps: int, clock: Clock) -> None:
    every = LOOK_EVERY if decoder.next.is_cuda else 1
    for done in range(steps):
        if done % every == 0 and decoder.stop_token is not None and bool(decoder.finished.all()):
            break
        step()
        clock.tick()
        if done % every == every - 1:
            _raise_what_went_wrong(decoder)
    _raise_what_went_wrong(decoder)


def _raise_what_went_wrong(decoder: Decoder) -> None:
    """Waits for the device."""
    not_finite = bool(decoder.not_finite)
    if decoder.model.tp.group is not None:
        fused_ops.check_errors(decoder.model.tp.group)  # the reason, where a failed call has poisoned the logits
    if not_finite:
        raise FloatingPointError(
            "the logits are not finite, so there is nothing to choose from; are all weights set, and finite?"
        )


def _cut(tokens: list[int], stop_token: int | None) -> list[int]:
    return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens


def own_stream(device: torch.device) -> Any:
    """A context with a new stream: CUDA captures on no default one, and what is captured has run there before."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class Clock:
    """Times between ticks, from its making on; on a GPU as the current stream comes by, and only `milliseconds` waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [(end - start) * 1e3 for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in pairs]
