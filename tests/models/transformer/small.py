"""Small Transformers of every style, and batches for them."""

from dataclasses import replace

import torch
from torch import Tensor

from models.transformer.config import TransformerConfig

LLAMA = TransformerConfig(
    layers=2,
    width=24,
    heads=8,
    kv_heads=4,
    head_dim=6,
    ffn=22,  # does not divide by four ranks
    vocabulary=37,
    max_length=32,
    activation="swiglu",
    norm="rmsnorm",
    positions="rope",
    tied_output=False,
    bias=False,
    vocabulary_multiple=8,
    init_std=0.2,
)
GPT2 = TransformerConfig(
    layers=2,
    width=20,
    heads=5,  # GPT-2 XL's 25 heads do not divide by the ranks either
    vocabulary=41,
    max_length=32,
    vocabulary_multiple=2,
    init_std=0.2,
)
STYLES = {
    "llama": LLAMA,
    "llama with biases, tied": replace(LLAMA, bias=True, tied_output=True),
    "gpt2": GPT2,
    "gpt2 untied, no bias": replace(GPT2, bias=False, tied_output=False),
}


def batch(config: TransformerConfig, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), some of them ignored."""
    generator = torch.Generator().manual_seed(samples * 100 + length)
    tokens = torch.randint(0, config.vocabulary, (samples, length), generator=generator)
    targets = torch.randint(0, config.vocabulary, (samples, length), generator=generator)
    targets[:, ::4] = -100
    return tokens, targets


def packed(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """(positions, documents) of samples in which a document ends at a third."""
    cut = length // 3
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(samples, length)
    documents = (torch.arange(length) >= cut).long().expand(samples, length)
    return positions, documents
