"""LayerNorm and RMSNorm, whose weights are replicated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.parallel.collectives import sum_gradients
from models.parallel.tensor_parallel import TensorParallel


class Norm(nn.Module):
    """Over the last dimension; "layernorm" (weight and bias) or "rmsnorm" (weight)."""

    def __init__(self, kind: str, width: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layernorm" else None

    def forward(self, input: Tensor, rows_are_split: bool) -> Tensor:
        """[M, H] of [M, H], or of this rank's rows: the weights' gradients are then summed over ranks."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if rows_are_split:
            weight, *rest = sum_gradients((weight,) if bias is None else (weight, bias), self.tp)
            bias = rest[0] if rest else None
        if bias is None:
            return F.rms_norm(input, weight.shape, weight, self.eps)
        return F.layer_norm(input, weight.shape, weight, bias, self.eps)
