"""Routers of every mode, and inputs for them."""

from dataclasses import replace

import torch
from torch import Tensor

from models.moe.config import MoEConfig
from models.moe.router import Choice, Router

PLAIN = MoEConfig(num_experts=12, top_k=3, ffn=10)
MODES = {
    "softmax": PLAIN,
    "softmax top-1": replace(PLAIN, top_k=1),
    "softmax, renormalised, scaled": replace(PLAIN, renormalize="chosen", scaling=2.5),
    "softmax, all experts": replace(PLAIN, top_k=12),
    "sigmoid": replace(PLAIN, score="sigmoid"),
    "sigmoid, renormalised": replace(PLAIN, score="sigmoid", renormalize="chosen"),
    "softmax with a bias": replace(PLAIN, bias_rate=0.1),
    "groups by their best": replace(PLAIN, n_groups=4, topk_groups=2, scaling=16.0),
    "groups by their best, one group": replace(PLAIN, n_groups=4, topk_groups=1),
    "groups by their two best, with a bias": replace(
        PLAIN,
        score="sigmoid",
        renormalize="chosen",
        scaling=2.5,
        n_groups=3,
        topk_groups=2,
        group_score="sum_of_two",
        bias_rate=0.1,
    ),
}


def router(config: MoEConfig, width: int = 16, seed: int = 0) -> Router:
    generator = torch.Generator().manual_seed(seed)
    made = Router(width, config)
    with torch.no_grad():
        made.weight.normal_(0, 0.4, generator=generator)
        if made.choice_bias is not None:
            made.choice_bias.normal_(0, 0.1, generator=generator)
    return made


def tokens(count: int, width: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def choice_of(logits: Tensor, config: MoEConfig) -> Choice:
    """What a router makes of given logits [T, E]."""
    made = Router(config.num_experts, config)
    with torch.no_grad():
        made.weight.copy_(torch.eye(config.num_experts))
    return made(logits)


def uneven_logits(count: int, num_experts: int, seed: int = 0) -> Tensor:
    """Some experts are far more wanted than others; no two scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, num_experts, generator=generator) + torch.linspace(1.5, -1.5, num_experts)
