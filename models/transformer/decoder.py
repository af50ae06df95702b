"""Sequences being generated: all of their state lies on the device, so that a step asks the host for nothing and a CUDA
graph can replay it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.transformer.model import Transformer
from models.transformer.sampling import Sampling, choose

WARM_UP_STEPS = 2  # before a capture: libraries load, channels and communicators are made, `comm=auto` decides


class Decoder:
    """B prompts and up to `steps` new tokens each; every rank of the model's group makes one alike.

    generated: [B, steps] int64, the new tokens so far, `prefill`'s first. A sequence that has met `stop_token` repeats it.
    finished: [B] bool, which have met it.
    not_finite: [1] bool, whether any logits were NaN or infinite; tokens chosen from then on mean nothing.
    static: attention reads the whole cache under a mask in every step, as `capture` needs it.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: list[list[int]],
        steps: int,
        sampling: Sampling,
        stop_token: int | None,
        static: bool,
    ) -> None:
        device, batch = model.embedding.weight.device, len(prompts)
        self.model, self.sampling, self.stop_token, self.static = model, sampling, stop_token, static
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        self.prompts = torch.tensor(padded, dtype=torch.int64, device=device)
        self.cache = model.new_cache(batch, longest + steps - 1)  # the last token is never fed
        self.next = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.generated = torch.zeros(batch, steps, dtype=torch.int64, device=device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.not_finite = torch.zeros(1, dtype=torch.bool, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # tokens of each sequence so far
        self.draws = (torch.zeros(steps, batch) if sampling.greedy else sampling.draws(steps, batch)).to(device)

    @torch.no_grad()
    def prefill(self) -> None:
        """The first new token of each prompt."""
        logits = self.model.logits(self.prompts, cache=self.cache, at=self.lengths - 1)
        self.cache.set_lengths(self.lengths)
        self.cache.static = self.static  # only now: a prompt attends to itself alone, for which SDPA has faster kernels
        self._take(logits)

    @torch.no_grad()
    def step(self) -> None:
        """One more token a sequence."""
        self._take(self.model.logits(self.next, cache=self.cache)[:, 0])

    def capture(self) -> Callable[[], None]:
        """`step` as one CUDA graph; replaying it is the call that is returned.

        Comes after `prefill`, on a stream that is not the default one, on which the graph must be replayed. The state is as
        before afterwards. RuntimeError for a model that calls what CUDA cannot capture.
        """
        if not self.static:
            raise ValueError("a CUDA graph replays steps of one shape; make the Decoder with static=True")
        state = (self.next, self.generated, self.finished, self.not_finite, self.count)
        before = [tensor.clone() for tensor in state]
        lengths = self.cache.lengths.clone()

        def rewind() -> None:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            self.cache.set_lengths(lengths)

        for _ in range(WARM_UP_STEPS):
            self.step()
            rewind()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.step()
        rewind()
        return graph.replay

    def _take(self, logits: Tensor) -> None:
        """Choose from logits [B, V], and write down what was chosen."""
        self.not_finite.logical_or_(logits.isfinite().all().logical_not())
        tokens = choose(logits, self.sampling, self.draws.index_select(0, self.count).squeeze(0))
        if self.stop_token is not None:
            tokens = tokens.masked_fill(self.finished, self.stop_token)
            self.finished.logical_or_(tokens == self.stop_token)
        self.next.copy_(tokens.unsqueeze(1))
        self.generated.index_copy_(1, self.count, self.next)
        self.count.add_(1)
