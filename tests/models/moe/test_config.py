"""Presets carry the published numbers; configs that make no layer are refused."""

from dataclasses import replace

import pytest

from models.moe.config import MoEConfig
from models.moe.presets import PRESETS

# experts, shared, top-k, FFN, score, renormalised, scaling, groups, of which chosen
PUBLISHED = {
    "switch": (128, 0, 1, 3072, "softmax", "none", 1.0, 1, 1),
    "gshard": (2048, 0, 2, 8192, "softmax", "chosen", 1.0, 1, 1),
    "mixtral_8x7b": (8, 0, 2, 14336, "softmax", "chosen", 1.0, 1, 1),
    "deepseek_moe_16b": (64, 2, 6, 1408, "softmax", "none", 1.0, 1, 1),
    "deepseek_v2": (160, 2, 6, 1536, "softmax", "none", 16.0, 8, 3),
    "deepseek_v3": (256, 1, 8, 2048, "sigmoid", "chosen", 2.5, 8, 4),
}
# capacity factor, auxiliary loss, bias rate
BALANCE = {
    "switch": (1.25, 0.01, None),
    "gshard": (2.0, 0.01, None),
    "mixtral_8x7b": (None, 0.02, None),
    "deepseek_moe_16b": (None, 0.001, None),
    "deepseek_v2": (None, 0.003, None),
    "deepseek_v3": (None, 0.0, 1e-3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_carry_the_published_numbers(name):
    c = PRESETS[name]
    sizes = (c.num_experts, c.shared_experts, c.top_k, c.ffn)
    assert (*sizes, c.score, c.renormalize, c.scaling, c.n_groups, c.topk_groups) == PUBLISHED[name]
    assert (c.capacity_factor, c.aux_loss, c.bias_rate) == BALANCE[name]
    assert c.min_capacity == 8


def test_no_preset_was_forgotten():
    assert set(PRESETS) == {*PUBLISHED, "tiny"}
    assert PRESETS["deepseek_v3"].group_score == "sum_of_two"
    assert PRESETS["deepseek_v2"].group_score == "max"
    assert PRESETS["gshard"].balance_over == "first"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"ffn": 0}, "ffn is 0; it must be at least 1"),
        ({"shared_experts": -1}, "shared_experts is -1; it must not be negative"),
        ({"aux_loss": -0.1}, "aux_loss is -0.1; it must be 0 or a positive number"),
        ({"z_loss": float("nan")}, "z_loss is nan; it must be 0 or a positive number"),
        ({"scaling": 0.0}, "scaling is 0.0; it must be a positive number"),
        ({"bias_rate": -1e-3}, "bias_rate is -0.001; it must be a positive number"),
        ({"drop": "position", "capacity_factor": 0.0}, "capacity_factor is 0.0; it must be a positive number"),
        ({"activation": "relu"}, "activation is 'relu'; allowed: gelu, swiglu"),
        ({"score": "tanh"}, "score is 'tanh'; allowed: softmax, sigmoid"),
        ({"drop": "random"}, "drop is 'random'; allowed: none, probability, position, choice"),
        ({"top_k": 13}, "top_k is 13; there are only 12 experts"),
        ({"n_groups": 5}, "12 experts do not divide over 5 groups"),
        ({"n_groups": 4, "topk_groups": 5}, "topk_groups is 5; there are only 4 groups"),
        ({"n_groups": 4, "top_k": 4}, "top_k is 4; 1 groups have only 3 experts"),
        ({"group_score": "sum_of_two"}, "group_score=sum_of_two means nothing with n_groups=1"),
        (
            {"group_score": "sum_of_two", "n_groups": 12, "topk_groups": 3},
            "group_score=sum_of_two needs groups of at least 2 experts",
        ),
        ({"top_k": 1, "renormalize": "chosen"}, "renormalize=chosen with top_k=1 makes every gate 1"),
        ({"capacity_factor": 1.0}, r"capacity_factor 1.0 means nothing with drop=none \(dropless\)"),
        ({"drop": "position"}, "drop=position needs a capacity_factor"),
        ({"renormalize": "kept"}, "renormalize=kept means nothing with drop=none"),
        ({"balance_over": "first"}, "balance_over=first means nothing with aux_loss=0"),
    ],
)
def test_configs_that_make_no_layer_are_refused(change, words):
    config = MoEConfig(num_experts=12, top_k=2, ffn=8)
    with pytest.raises(ValueError, match=words) as refused:
        replace(config, **change)
    assert "\n" not in str(refused.value)
