"""The optimizer of a Transformer, and its gradients' norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import optimizer_states
from trainers.config import OptimConfig

CLIP_EPS = 1e-6  # torch's and DeepSpeed's


def make_optimizer(
    optim: OptimConfig, parameters: Mapping[str, nn.Parameter], states: bool = True
) -> torch.optim.Optimizer:
    """sgd, adam or adamw, which decays matrices alone (as GPT-3 does; not biases, not norms).

    states: made at once, so that a checkpoint can be loaded before the first step.
    """
    if optim.name == "sgd":
        return torch.optim.SGD(list(parameters.values()), lr=optim.lr)
    betas = (optim.betas[0], optim.betas[1])
    if optim.name == "adam":
        adam = torch.optim.Adam(list(parameters.values()), lr=optim.lr, betas=betas, eps=optim.eps)
    else:
        matrices = [p for p in parameters.values() if p.dim() > 1]
        others = [p for p in parameters.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps)
    return optimizer_states.with_states(adam) if states else adam


def clip(gradients: Mapping[str, Tensor], split: set[str], group: dist.ProcessGroup | None, limit: float) -> None:
    """Scale the gradients so that their norm over the whole model is `limit` at most.

    split: names of parameters of which each rank of `group` holds another part; the others are the same on all of them.
    Every rank scales by the same bits.
    """
    if not gradients:
        return
    on = next(iter(gradients.values())).device
    squares = torch.zeros((), dtype=torch.float64, device=on)
    counts_all = group is None or dist.get_rank(group) == 0
    for name, gradient in gradients.items():
        if name in split or counts_all:
            squares += gradient.double().square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    factor = (limit / (squares.sqrt() + CLIP_EPS)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.dtype))
