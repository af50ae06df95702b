"""A choice of experts as rows sorted by expert, which is what `all_to_all_gemm` and `gemm_all_to_all` take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.moe.capacity import capacity, kept_rows
from models.moe.config import MoEConfig
from models.moe.router import Choice
from models.moe.statistics import load_per_expert


@dataclass(frozen=True)
class Routing:
    """R routed rows of T tokens, k a token, all of expert 0, then of expert 1, and so on; an expert's by token.

    tokens: [R] int64, each row's token. gates: [R] fp32, its weight, differentiable. counts: [E] int64, rows of each expert.
    kept: [T, k] bool, which rows of the choice are among them, the others being dropped; None = all.
    """

    tokens: Tensor
    gates: Tensor
    counts: Tensor
    kept: Tensor | None = None

    @property
    def dropped_share(self) -> float:
        """Of the T * k rows that were chosen."""
        if self.kept is None or not self.kept.numel():
            return 0.0
        return 1 - len(self.tokens) / self.kept.numel()


def route(choice: Choice, config: MoEConfig) -> Routing:
    """All rows of the choice that the experts' capacity lets in."""
    tokens, top_k = choice.experts.shape
    kept = None
    if config.capacity_factor is not None:
        limit = capacity(tokens, top_k, config.num_experts, config.capacity_factor, config.min_capacity)
        kept = kept_rows(choice, limit, config.drop)
    gates, experts = choice.gates, choice.experts.flatten()
    if kept is None:
        rows = experts.argsort(stable=True)
    else:
        if config.renormalize == "kept":
            gates = gates * kept
            # Clamped as DeepSpeed clamps it; a token that lost all its rows has a sum of zero.
            total = gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
            gates = gates / total * config.scaling
        rows = kept.flatten().nonzero().squeeze(1)
        rows = rows[experts[rows].argsort(stable=True)]
    return Routing(rows // top_k, gates.flatten()[rows], load_per_expert(experts[rows], config.num_experts), kept)
