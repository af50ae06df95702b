"""Configs count their parameters; those that make no model are refused."""

from dataclasses import replace

import pytest
import torch

from models.transformer.config import RotaryScaling, TransformerConfig
from models.transformer.model import Transformer
from tests.models.transformer.small import STYLES


@pytest.mark.parametrize("config", STYLES.values())
def test_the_count_is_that_of_the_model(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count(padding=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0; it must be a positive number"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; it must be a positive number"),
        ({"init_std": float("nan")}, "init_std is nan; it must not be negative"),
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
