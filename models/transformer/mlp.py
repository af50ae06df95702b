"""The feed-forward layer: GELU (Hendrycks & Gimpel, arXiv 1606.08415) or SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from models.parallel.linear import ColumnParallelLinear, RowParallelLinear
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig


class MLP(nn.Module):
    """up: column-parallel, [F_r, H], or [2, F_r, H] for SwiGLU (gate, then up); down: row-parallel, [H, F_r]."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        stacked = 2 if self.gated else 1
        self.up = ColumnParallelLinear(config.width, config.ffn_width, 1, bias=config.bias, tp=tp, stacked=stacked)
        self.down = RowParallelLinear(config.ffn_width, 1, config.width, bias=config.bias, tp=tp)

    def forward(self, input: Tensor, total_rows: int | None = None) -> Tensor:
        """[M, H] of [M, H], or this rank's rows of this rank's rows of `total_rows`."""
        hidden = self.up(input, total_rows)
        if self.gated:
            gate, up = hidden.unbind(1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return self.down(hidden, total_rows)
