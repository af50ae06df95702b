"""Choosing the next token: the likeliest, or drawn at a temperature, among the top k, the nucleus (Holtzman et al.,
arXiv 1904.09751), or both.

Every rank of a tensor-parallel group chooses for itself and all choose alike, so no token is sent:

- the logits have the same bits on all ranks: each gathered them from the same pieces;
- draws come from a generator on the CPU, seeded alike, so they do not depend on the device either;
- weights are one exponential a token, then integers. A GPU's floating-point prefix sum adds up in an order that may differ
  between runs, which near an edge would be another token on one rank; integers add up the same in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Weight of the likeliest token. The sum over 2^22 tokens still fits 63 bits, and what is 2^-40 as likely is never drawn.
WEIGHT_OF_LIKELIEST = 1 << 40


@dataclass(frozen=True)
class Sampling:
    """temperature: logits are divided by it; 0 takes the likeliest token, and then the others mean nothing.

    top_k: only tokens whose logit is at least the k-th largest. top_p: of those, the likeliest whose probabilities add up to
    `top_p`, the one that reaches it included. Tokens as likely as the last of them are taken too, so the order of equal
    logits, which is no device's promise, cannot matter.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1, or None")
        if self.greedy and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p mean nothing with temperature=0, which takes the likeliest token")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def draws(self, steps: int, batch: int) -> Tensor:
        """[steps, batch] float64 in [0, 1), on the CPU; more steps begin with the same ones."""
        # One call a step: a call may hand out its numbers in an order that depends on how many it is asked for.
        generator = torch.Generator().manual_seed(self.seed)
        return torch.stack([torch.rand(batch, dtype=torch.float64, generator=generator) for _ in range(steps)])


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """The next token of each sequence, [B] int64. logits [B, V] of any float dtype, draws [B] float64 in [0, 1).

    Of equally likely tokens greedy takes the first. What logits with NaN or infinity give means nothing, and may be no token.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    cumulative = weights(logits, sampling).cumsum(-1)
    total = cumulative[:, -1]
    # A product that rounds up to `total` is one too many.
    target = (draws * total).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] int64, in proportion to the probabilities that `sampling` draws by; 0 for a token it leaves out."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        last = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    logits = logits.double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    drawn_by = (scaled.exp() * WEIGHT_OF_LIKELIEST).long()
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked = drawn_by.sort(-1, descending=True).values
        before = ranked.cumsum(-1) - ranked
        nucleus = (before < sampling.top_p * drawn_by.sum(-1, keepdim=True).double()).sum(-1, keepdim=True)
        drawn_by = drawn_by.masked_fill(drawn_by < ranked.gather(-1, nucleus - 1), 0)
    return drawn_by
