"""Published sizes: GPT-2 (Radford et al. 2019), Megatron-LM (arXiv 2104.04473), GPT-3 (2005.14165), Llama 3 (2407.21783)."""

from __future__ import annotations

from models.transformer.config import TransformerConfig


def _gpt2(layers: int, heads: int, width: int) -> TransformerConfig:
    return TransformerConfig(layers=layers, width=width, heads=heads, vocabulary=50257, max_length=1024)


def _megatron(layers: int, width: int, heads: int) -> TransformerConfig:
    return TransformerConfig(layers=layers, width=width, heads=heads, vocabulary=51200, max_length=2048)


PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2_medium": _gpt2(24, 16, 1024),
    "gpt2_large": _gpt2(36, 20, 1280),
    "gpt2_xl": _gpt2(48, 25, 1600),
    "megatron_1_7b": _megatron(24, 2304, 24),
    "megatron_3_6b": _megatron(30, 3072, 32),
    "megatron_7_5b": _megatron(36, 4096, 32),
    "megatron_18b": _megatron(40, 6144, 48),
    "megatron_39b": _megatron(48, 8192, 64),
    "gpt3_175b": _megatron(96, 12288, 96),
    "llama3_8b": TransformerConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=128256,
        max_length=8192,
        activation="swiglu",
        norm="rmsnorm",
        positions="rope",
        rope_theta=5e5,
        tied_output=False,
        bias=False,
    ),
    # Small enough to train on two cores, and splits over 1, 2 and 4 ranks; bytes and a few specials are its vocabulary.
    "transformer_tiny": TransformerConfig(
        layers=4,
        width=128,
        heads=8,
        kv_heads=4,
        ffn=384,
        vocabulary=260,
        max_length=256,
        activation="swiglu",
        norm="rmsnorm",
        positions="rope",
        bias=False,
        vocabulary_multiple=4,
    ),
}


def preset(name: str) -> TransformerConfig:
    """The config of that name, or ValueError with the names there are."""
    if name not in PRESETS:
        raise ValueError(f"no Transformer preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
