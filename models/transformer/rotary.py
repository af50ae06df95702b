"""Rotary position embedding (Su et al., arXiv 2104.09864), in Llama's layout: dimension i turns with i + head_dim / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.transformer.config import RotaryScaling, TransformerConfig


def rotation(positions: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [B, S, 1, head_dim / 2] fp32, of positions [B, S]."""
    half = config.size_of_head // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = positions.unsqueeze(-1).float() * frequencies
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [B, S, n, head_dim], turned by each token's position; computed in fp32 or wider, dtype kept."""
    dtype = torch.promote_types(heads.dtype, torch.float32)
    first, second = heads.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _scaled(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Llama 3.1: wavelengths beyond original / low are stretched by `factor`, those under original / high are not."""
    turns = scaling.original_length * frequencies / (2 * math.pi)  # over the original length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
