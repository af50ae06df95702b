"""Losses that keep a router balanced and its logits small, computed in fp32 (or wider, where the logits are).

Over the tokens of one call: where these are split over ranks, each rank balances its own, as in DeepSpeed and GShard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.moe.config import MoEConfig
from models.moe.router import Choice
from models.moe.statistics import load_per_expert


def auxiliary_loss(probabilities: Tensor, experts: Tensor, over: str = "all") -> Tensor:
    """Load balancing: E * sum_e f_e * P_e, 1 for an even load.

    P_e = mean over tokens of `probabilities` [T, E]; f_e = share of the rows that chose e, before any is dropped. With k = 1
    it is Switch's (arXiv 2101.03961, eq. 4). For more choices, `experts` [T, k], the rows are

    - "all" of them, f_e = (rows of e) / (T * k): DeepSeekMoE's (arXiv 2401.06066, eq. 12 to 14), DeepSpeed's for k > 2;
      Mixtral's in `transformers`, which does not divide by k, is k times as much.
    - the "first" of a token, f_e = (tokens whose best expert is e) / T: GShard's (arXiv 2006.16668, algorithm 1) times E^2,
      DeepSpeed's for k = 2.

    0 where there are no tokens. f has no gradient.
    """
    tokens, num_experts = probabilities.shape
    rows = experts[:, :1] if over == "first" else experts
    probabilities = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    share = load_per_expert(rows, num_experts).to(probabilities.dtype) / max(1, rows.numel())
    return num_experts * (share * probabilities.sum(0) / max(1, tokens)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits [T, E])^2 (ST-MoE, arXiv 2202.08906, eq. 5); 0 where there are none."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.logsumexp(-1).square().sum() / max(1, len(logits))


def router_loss(choice: Choice, config: MoEConfig) -> Tensor:
    """What a layer adds to the training loss: both, times their coefficients."""
    loss = choice.logits.new_zeros(())
    if config.aux_loss:
        loss = loss + config.aux_loss * auxiliary_loss(choice.probabilities, choice.experts, config.balance_over)
    if config.z_loss:
        loss = loss + config.z_loss * z_loss(choice.logits)
    return loss
