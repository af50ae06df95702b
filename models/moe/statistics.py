"""How even a routing is. All stays on the device: nothing here asks the host to wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.moe.router import Choice
    from models.moe.routing import Routing


@dataclass(frozen=True)
class Statistics:
    """Of one call. With no tokens all are 0.

    load: [E] int64, rows that chose each expert, dropped ones with them.
    dropped_share: of these rows.
    entropy: of a token's probabilities, in nats, its mean over tokens: log E where the router knows nothing, 0 where it is
        certain.
    load_entropy: of the load's shares: log E where it is even, 0 where one expert has it all.
    imbalance: the largest load over the mean one, 1 where it is even.
    """

    load: Tensor
    dropped_share: float
    entropy: Tensor
    load_entropy: Tensor
    imbalance: Tensor


def load_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """[E] int64: how often each expert is in `experts`, int64 of any shape."""
    flat = experts.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


@torch.no_grad()
def statistics(choice: Choice, routing: Routing) -> Statistics:
    load = load_per_expert(choice.experts, choice.num_experts)
    shares = load / load.sum().clamp(min=1)
    entropy = torch.special.entr(choice.probabilities).sum() / max(1, len(choice.logits))
    load_entropy = torch.special.entr(shares).sum()
    return Statistics(load, routing.dropped_share, entropy, load_entropy, shares.max() * choice.num_experts)
