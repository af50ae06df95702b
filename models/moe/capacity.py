"""How many rows an expert takes, and which, where more tokens chose it."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from models.moe.router import Choice
from models.moe.statistics import load_per_expert


def capacity(tokens: int, top_k: int, num_experts: int, factor: float, minimum: int = 8) -> int:
    """Rows an expert takes: ceil(tokens * top_k / num_experts * factor), at least `minimum` (DeepSpeed's rule).

    The factor is taken as the decimal it is written as. DeepSpeed rounds to fp32 first, which is the same for 1.0, 1.25, 2.0
    and the like, but may give one more for a factor such as 1.2.
    """
    return max(math.ceil(Fraction(str(factor)) * tokens * top_k / num_experts), minimum)


def kept_rows(choice: Choice, limit: int, drop: str) -> Tensor:
    """[T, k] bool: which rows their expert takes, at most `limit` an expert; the others are dropped.

    drop: what a full expert keeps: "probability", the highest scores, the first token of equal ones; "position", the first
    tokens; "choice", the first tokens' first choices, then second choices, and so on.
    """
    tokens, top_k = choice.experts.shape
    if limit >= tokens:  # a token's experts are all different, so none gets more
        return torch.ones_like(choice.experts, dtype=torch.bool)
    rows = torch.arange(tokens * top_k, device=choice.experts.device)  # row = token * k + rank of the choice
    if drop == "probability":
        rows = choice.scores.detach().gather(1, choice.experts).flatten().argsort(descending=True, stable=True)
    elif drop == "choice":
        rows = rows.view(tokens, top_k).t().flatten()
    elif drop != "position":
        raise ValueError(f"drop is {drop!r}; allowed: probability, position, choice")
    experts = choice.experts.flatten()[rows]
    order = experts.argsort(stable=True)
    load = load_per_expert(choice.experts, choice.num_experts)
    before = load.cumsum(0) - load
    place = torch.arange(len(order), device=order.device) - before[experts[order]]
    kept = torch.empty_like(experts, dtype=torch.bool)
    kept[rows[order]] = place < limit
    return kept.view(tokens, top_k)
