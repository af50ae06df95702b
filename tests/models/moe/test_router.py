"""Every mode against a token-by-token choice in plain Python, and against `transformers`."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from models.moe.config import MoEConfig
from models.moe.router import Choice
from tests.models.close import assert_close
from tests.models.moe.cases import MODES, PLAIN, choice_of, router, tokens


def one_token(logits: list[float], bias: list[float], config: MoEConfig) -> tuple[list[int], list[float]]:
    """(experts, gates) of one token."""
    if config.score == "softmax":
        powers = [math.exp(x - max(logits)) for x in logits]
        scores = [p / sum(powers) for p in powers]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [list(range(g * config.group_size, (g + 1) * config.group_size)) for g in range(config.n_groups)]

    def worth(group: list[int]) -> float:
        best = sorted((wanted[e] for e in group), reverse=True)
        return best[0] if config.group_score == "max" else best[0] + best[1]

    allowed = [e for group in sorted(groups, key=worth, reverse=True)[: config.topk_groups] for e in group]
    experts = sorted(allowed, key=lambda e: wanted[e], reverse=True)[: config.top_k]
    gates = [scores[e] for e in experts]
    if config.renormalize == "chosen":
        gates = [g / sum(gates) for g in gates]
    return experts, [g * config.scaling for g in gates]


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_every_mode_chooses_as_a_loop_over_tokens_does(config):
    model, input = router(config), tokens(200)
    choice = model(input)
    logits = input.double() @ model.weight.detach().double().t()
    bias = [0.0] * 12 if model.choice_bias is None else model.choice_bias.tolist()
    want = [one_token(row.tolist(), bias, config) for row in logits]
    assert choice.experts.tolist() == [experts for experts, _ in want]
    assert_close(choice.gates, torch.tensor([gates for _, gates in want]), "gates", 1e-6)
    assert_close(choice.logits, logits, "logits", 1e-6)
    assert_close(choice.probabilities.sum(-1), torch.ones(200), "probabilities", 1e-6)


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_no_tokens(config):
    model = router(config)
    choice = model(tokens(0))
    assert choice.experts.shape == choice.gates.shape == (0, config.top_k)
    assert choice.scores.shape == (0, 12)
    choice.gates.sum().backward()
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_gates_teach_the_router(config):
    model, input = router(config), tokens(20)
    model = model.double()
    gates = model(input.double()).gates
    coefficients = torch.linspace(-1, 1, gates.numel(), dtype=torch.float64).view_as(gates)
    (gates * coefficients).sum().backward()
    step = torch.randn(model.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e-6
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            model.weight.add_(step, alpha=sign)
            ends.append((model(input.double()).gates * coefficients).sum())
            model.weight.sub_(step, alpha=sign)
    assert model.weight.grad.abs().max() > 1e-3
    assert_close((model.weight.grad * step).sum(), (ends[0] - ends[1]) / 2, "slope", 1e-5)


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4], ids=["equal", "extreme", "extreme and negative"])
def test_equal_and_extreme_logits_give_numbers(config, size):
    logits = torch.full((6, 12), size)
    logits[2:4, ::3] = -size
    logits[4:, 5] = size / 2
    logits.requires_grad_()
    choice = choice_of(logits, config)
    for part in (choice.gates, choice.scores, choice.probabilities):
        assert part.isfinite().all()
    choice.gates.square().sum().backward()
    assert logits.grad.isfinite().all()
    for row in choice.experts.tolist():
        assert len(set(row)) == config.top_k


def test_of_equal_scores_the_first_experts_are_chosen():
    assert choice_of(torch.zeros(3, 12), PLAIN).experts.tolist() == [[0, 1, 2]] * 3
    logits = torch.zeros(2, 12)
    logits[:, [3, 7, 8]] = 1
    assert choice_of(logits, replace(PLAIN, top_k=5)).experts.tolist() == [[3, 7, 8, 0, 1]] * 2
    grouped = replace(PLAIN, n_groups=4, topk_groups=2, top_k=5)
    assert choice_of(torch.zeros(1, 12), grouped).experts.tolist() == [[0, 1, 2, 3, 4]]
    few_values = torch.randint(0, 4, (200, 256), generator=torch.Generator().manual_seed(0)) / 4
    many = replace(PLAIN, num_experts=256, top_k=8, score="sigmoid")
    want = [sorted(range(256), key=lambda e: -row[e])[:8] for row in few_values.tolist()]
    assert choice_of(few_values, many).experts.tolist() == want


def test_nan_chooses_experts_that_exist():
    logits = torch.zeros(4, 12)
    logits[1], logits[2, 5], logits[3, 7] = float("nan"), float("nan"), float("inf")
    for config in MODES.values():
        choice = choice_of(logits, config)
        for row in choice.experts.tolist():
            assert len(set(row)) == config.top_k
            assert 0 <= min(row) <= max(row) < 12
        assert choice.gates[1].isnan().all(), "and it shows"


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_routed_in_fp32(autocast):
    model, input = router(MODES["softmax"]).bfloat16(), tokens(50).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        choice = model(input)
    assert choice.gates.dtype == choice.scores.dtype == choice.logits.dtype == torch.float32
    assert_close(choice.logits, input.double() @ model.weight.double().t(), "logits", 1e-6)
    choice.gates.square().sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


def test_the_bias_changes_the_choice_alone():
    config = replace(PLAIN, score="sigmoid", bias_rate=1.0)
    model, input = router(config), tokens(30)
    model.choice_bias.zero_()
    before = model(input)
    model.choice_bias[7] = 5.0
    after = model(input)
    assert (after.experts[:, 0] == 7).all()
    assert torch.equal(after.scores, before.scores)
    assert torch.equal(after.gates, after.scores.gather(1, after.experts))


@pytest.mark.parametrize("group_score", ["max", "sum_of_two"])
def test_a_bias_that_all_share_changes_no_choice(group_score):
    config = replace(PLAIN, score="sigmoid", bias_rate=1.0, n_groups=4, topk_groups=1, group_score=group_score)
    model = router(config)
    model.choice_bias.zero_()
    before = model(tokens(30)).experts
    model.choice_bias.fill_(-5.0)  # all below the zero that a masked score could be
    assert torch.equal(model(tokens(30)).experts, before)


def test_the_bias_moves_towards_the_mean_load():
    model = router(replace(PLAIN, num_experts=4, bias_rate=0.5))
    start = model.choice_bias.clone()
    model.update_bias(torch.tensor([3, 2, 0, 3]))
    assert_close(model.choice_bias - start, torch.tensor([-0.5, 0, 0.5, -0.5]))
    model.update_bias(torch.zeros(4, dtype=torch.int64))
    assert_close(model.choice_bias - start, torch.tensor([-0.5, 0, 0.5, -0.5]))


def test_the_bias_evens_the_load():
    config = replace(PLAIN, num_experts=8, top_k=2, score="sigmoid", bias_rate=0.01)
    model, input = router(config), tokens(400) + 0.5  # what all tokens share makes some experts more wanted
    model.choice_bias.zero_()

    def load() -> torch.Tensor:
        return model(input).experts.flatten().bincount(minlength=8)

    first = load().max() / 100
    for _ in range(100):
        model.update_bias(load())
    assert load().max() / 100 < 1.1 < 1.3 < first


def test_the_bias_is_saved_is_no_parameter_and_stays_in_fp32():
    model = router(MODES["softmax with a bias"])
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    assert set(model.state_dict()) == {"weight", "choice_bias"}
    bias = model.choice_bias.clone()
    model.bfloat16()
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.choice_bias, bias)
    assert set(router(PLAIN).state_dict()) == {"weight"}


def test_a_load_that_is_none_is_refused():
    model = router(MODES["softmax with a bias"])
    for load in (torch.zeros(11, dtype=torch.int64), torch.zeros(12)):
        with pytest.raises(ValueError, match=r"it must be \[12\] integers"):
            model.update_bias(load)
    with pytest.raises(ValueError, match="update_bias needs a bias_rate"):
        router(PLAIN).update_bias(torch.zeros(12, dtype=torch.int64))


def compare(choice: Choice, gates: torch.Tensor, experts: torch.Tensor) -> None:
    """Whatever the order within a token."""
    experts, order = experts.sort(-1)
    got, mine = choice.experts.sort(-1)
    assert torch.equal(got, experts)
    assert_close(choice.gates.gather(1, mine), gates.gather(1, order), "gates", 1e-6)


def test_mixtral_equals_transformers():
    theirs = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2))
    model = router(replace(PLAIN, num_experts=8, top_k=2, renormalize="chosen"))
    theirs.load_state_dict({"weight": model.weight})
    _, gates, experts = theirs(tokens(500))
    choice = model(tokens(500))
    assert torch.equal(choice.experts, experts)
    assert torch.equal(choice.gates, gates)


@pytest.mark.parametrize("groups", [1, 8])
def test_deepseek_v2_equals_transformers(groups):
    theirs = DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=16,
            num_attention_heads=4,
            n_routed_experts=160,
            num_experts_per_tok=6,
            topk_method="greedy" if groups == 1 else "group_limited_greedy",
            n_group=groups,
            topk_group=min(groups, 3),
            routed_scaling_factor=16.0,
        )
    )
    config = replace(PLAIN, num_experts=160, top_k=6, scaling=16.0, n_groups=groups, topk_groups=min(groups, 3))
    model = router(config)
    theirs.load_state_dict({"weight": model.weight})
    _, gates, experts = theirs(tokens(500))
    compare(model(tokens(500)), gates, experts)


@pytest.mark.parametrize("renormalize", ["chosen", "none"])
def test_deepseek_v3_equals_transformers(renormalize):
    theirs = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=16, norm_topk_prob=renormalize == "chosen"))
    mode = MODES["groups by their two best, with a bias"]
    config = replace(mode, num_experts=256, top_k=8, n_groups=8, topk_groups=4, renormalize=renormalize)
    model = router(config)
    theirs.load_state_dict({"weight": model.weight, "e_score_correction_bias": model.choice_bias})
    _, gates, experts = theirs(tokens(500))
    compare(model(tokens(500)), gates, experts)
