"""How much of the cards' arithmetic a token takes: model FLOP utilisation (PaLM, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import torch

from models.transformer.config import TransformerConfig

# Dense bf16, FLOP/s, by what the name of a card holds; the first that fits counts.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
    ("B200", 2.25e15),
    ("MI300X", 1.3e15),
)


def training_flops_per_token(config: TransformerConfig, length: int) -> float:
    """6 for each weight that a token meets (a multiplication and an addition, forward, and twice that backward), and
    12 * layers * heads * head_dim * length for the attention of a sample of `length`, the causal half not taken off.

    A run that computes blocks again in backward (engine.checkpoint_activations) does more; utilisation does not count it.
    """
    head, kv = config.heads * config.size_of_head, config.num_kv_heads * config.size_of_head
    ups = 2 if config.activation == "swiglu" else 1
    layer = config.width * (head + 2 * kv) + head * config.width + (ups + 1) * config.width * config.ffn_width
    weights = config.layers * layer + config.vocabulary * config.width
    return 6.0 * weights + 12.0 * config.layers * head * length


def peak_flops(device: torch.device) -> float | None:
    """Of one card in dense bf16, FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in PEAKS if words in name), None)
