"""The experts' FFN on one process, expert by expert: what every faster form of it must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.moe.routing import Routing


def dense_loop(input: Tensor, routing: Routing, w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    """[T, H]: a token's sum, over its routed rows, of gate * FFN_expert(input), summed in fp32 or wider by expert.

    input: [T, H]. w1: [E, F, H], or for "swiglu" [E, 2, F, H] (gate, then up). w2: [E, H, F]. A token without a row gets
    zeros, and so does the gradient of an expert without one.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    output = torch.zeros(input.shape, dtype=dtype, device=input.device)
    counts = routing.counts.tolist()
    pieces = zip(routing.tokens.split(counts), routing.gates.split(counts), w1, w2, strict=True)
    for tokens, gates, up, down in pieces:
        hidden = expert(input[tokens], up, down, activation)
        output = output.index_add(0, tokens, gates.unsqueeze(1) * hidden.to(dtype))
    return output.to(input.dtype)


def expert(input: Tensor, w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    """[R, H]: one expert's FFN of rows [R, H]; w1 [F, H] or [2, F, H], w2 [H, F]."""
    if activation == "swiglu":
        gate, up = F.linear(input, w1.flatten(0, 1)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2)
    return F.linear(F.gelu(F.linear(input, w1), approximate="tanh"), w2)
