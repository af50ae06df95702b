"""Presets carry the published numbers; configs that make no model are refused."""

from dataclasses import replace

import pytest
import torch

from models.transformer.config import RotaryScaling, TransformerConfig
from models.transformer.model import Transformer
from models.transformer.presets import PRESETS, preset
from tests.models.transformer.small import STYLES

# layers, width, heads, KV heads, FFN, vocabulary, length
PUBLISHED = {
    "gpt2": (12, 768, 12, 12, 3072, 50257, 1024),
    "gpt2_medium": (24, 1024, 16, 16, 4096, 50257, 1024),
    "gpt2_large": (36, 1280, 20, 20, 5120, 50257, 1024),
    "gpt2_xl": (48, 1600, 25, 25, 6400, 50257, 1024),
    "megatron_1_7b": (24, 2304, 24, 24, 9216, 51200, 2048),
    "megatron_3_6b": (30, 3072, 32, 32, 12288, 51200, 2048),
    "megatron_7_5b": (36, 4096, 32, 32, 16384, 51200, 2048),
    "megatron_18b": (40, 6144, 48, 48, 24576, 51200, 2048),
    "megatron_39b": (48, 8192, 64, 64, 32768, 51200, 2048),
    "gpt3_175b": (96, 12288, 96, 96, 49152, 51200, 2048),
    "llama3_8b": (32, 4096, 32, 8, 14336, 128256, 8192),
}
# What the publishers count: GPT-2's checkpoints and Llama 3 8B to the last one, Megatron in billions.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
}
BILLIONS = {
    "megatron_1_7b": 1.7,
    "megatron_3_6b": 3.6,
    "megatron_7_5b": 7.5,
    "megatron_18b": 18.4,
    "megatron_39b": 39.1,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_carry_the_published_numbers(name):
    c = preset(name)
    found = (c.layers, c.width, c.heads, c.num_kv_heads, c.ffn_width, c.vocabulary, c.max_length)
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_the_published_count(name):
    assert preset(name).parameter_count() == COUNTS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_in_billions(name):
    assert round(preset(name).parameter_count() / 1e9, 1) == pytest.approx(BILLIONS[name], abs=0.06)


def test_no_preset_was_forgotten():
    assert set(PRESETS) == {*PUBLISHED, "transformer_tiny"}
    with pytest.raises(ValueError, match="no Transformer preset 'gpt4'; there are: gpt2,"):
        preset("gpt4")


@pytest.mark.parametrize("config", [*STYLES.values(), *PRESETS.values()])
def test_the_count_is_that_of_the_model(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count(padding=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be at least 1, or None"),
        ({"activation": "relu"}, "activation is 'relu'; allowed: gelu, swiglu"),
        ({"norm": "batch"}, "norm is 'batch'; allowed: layernorm, rmsnorm"),
        ({"positions": "alibi"}, "positions is 'alibi'; allowed: learned, rope"),
        ({"width": 10, "heads": 4}, "width 10 does not divide by 4 heads; give head_dim"),
        ({"heads": 4, "kv_heads": 3}, "4 heads do not divide over 3 KV heads"),
        ({"head_dim": 3, "positions": "rope"}, "needs an even head_dim, got 3"),
        ({"rope_scaling": RotaryScaling(8, 1, 4, 16)}, "rope_scaling means nothing with positions=learned"),
    ],
)
def test_configs_that_make_no_model_are_refused(change, words):
    config = TransformerConfig(layers=1, width=8, heads=4, vocabulary=5, max_length=4)
    with pytest.raises(ValueError, match=words):
        replace(config, **change)
