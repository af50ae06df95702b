"""Which experts a token goes to, and with which weight.

Softmax of all logits (Switch, arXiv 2101.03961; Mixtral, arXiv 2401.04088) or a sigmoid of each (DeepSeek-V3, arXiv
2412.19437), the k best, or the k best within the best groups (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.moe.config import MoEConfig

TINY = 1e-20  # DeepSeek-V3's: sigmoids of a token may all be zero


@dataclass(frozen=True)
class Choice:
    """T tokens, E experts, k a token. Floats are fp32 (or wider, where the input is), and differentiable.

    experts: [T, k] int64, a token's best first, all different. gates: [T, k], their weights; with renormalize="kept" scores
    as they are, which `routing.route` makes weights.
    scores, logits: [T, E].
    """

    experts: Tensor
    gates: Tensor
    scores: Tensor
    logits: Tensor

    @property
    def num_experts(self) -> int:
        return self.logits.shape[1]

    @property
    def probabilities(self) -> Tensor:
        """[T, E]: the scores of a token as parts of their sum, which those of a softmax are already."""
        return self.scores / (self.scores.sum(-1, keepdim=True) + TINY)


class Router(nn.Module):
    """weight: [E, H]. choice_bias: [E] fp32 buffer, added to the scores to choose by, never to a gate; or None.

    A forward changes nothing, so that running it again in backward (activation checkpointing) chooses the same. The weight is
    unset until it is initialised or loaded.
    """

    choice_bias: Tensor | None

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        self.register_buffer("choice_bias", None if config.bias_rate is None else torch.zeros(config.num_experts))

    def forward(self, input: Tensor) -> Choice:
        """input: [T, H] of any float dtype."""
        with torch.autocast(input.device.type, enabled=False):
            dtype = torch.promote_types(input.dtype, torch.float32)
            logits = F.linear(input.to(dtype), self.weight.to(dtype))
            scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
            experts = self._choose(scores.detach())
            gates = scores.gather(1, experts)
            if self.config.renormalize == "chosen":
                gates = gates / (gates.sum(-1, keepdim=True) + TINY)
            if self.config.renormalize != "kept":
                gates = gates * self.config.scaling
        return Choice(experts, gates, scores, logits)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """One step of balancing: up by the rate for experts with less than the mean load, down for those with more.

        load: [E] integers, how many rows chose each expert since the last step, over all ranks.
        """
        rate = self.config.bias_rate
        if rate is None or self.choice_bias is None:
            raise ValueError("update_bias needs a bias_rate")
        if load.shape != self.choice_bias.shape or load.is_floating_point():
            raise ValueError(
                f"load is {load.dtype} {tuple(load.shape)}; it must be [{self.config.num_experts}] integers"
            )
        # In integers, so that an expert with just the mean load stays where it is.
        below = (load.sum() - load.long() * self.config.num_experts).sign()
        self.choice_bias.add_(below.to(self.choice_bias), alpha=rate)

    def _choose(self, scores: Tensor) -> Tensor:
        """[T, k] int64 of scores [T, E]."""
        config = self.config
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if config.topk_groups < config.n_groups:
            grouped = scores.unflatten(1, (config.n_groups, config.group_size))
            best = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
            chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, first_best(best, config.topk_groups), True)
            scores = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
        return first_best(scores, config.top_k)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.choice_bias
        super()._apply(fn, recurse)
        if bias is not None and self.choice_bias is not None and self.choice_bias.dtype != bias.dtype:
            # A model made bf16 keeps it in fp32: a step of 1e-3 is less than the last bit of a bf16 bias of 1.
            self.choice_bias = bias.to(self.choice_bias.device)
        return self


def first_best(values: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest values of each row [T, E], largest first; of equal ones the first (`topk` promises none).

    At least `count` of a row must be above -infinity; NaN counts as largest.
    """
    values, found = values.clone(), []
    for _ in range(count):  # for a few of many columns far faster than a stable sort
        found.append(values.max(dim=-1, keepdim=True).indices)
        values.scatter_(1, found[-1], float("-inf"))
    return torch.cat(found, dim=1)
