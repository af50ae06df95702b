"""Losses against their formulas, token by token, and against `transformers` (DeepSpeed's: test_capacity)."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers import modeling_switch_transformers as switch

from models.moe.losses import auxiliary_loss, router_loss, z_loss
from tests.models.close import assert_close
from tests.models.moe.cases import MODES, PLAIN, choice_of, router, tokens, uneven_logits


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
@pytest.mark.parametrize("over", ["all", "first"])
def test_the_auxiliary_loss_is_its_formula(config, over):
    choice = router(config)(tokens(60))
    rows = [row[: 1 if over == "first" else config.top_k] for row in choice.experts.tolist()]
    scores = choice.scores.double().tolist()
    want = 0.0
    for expert in range(12):
        share = sum(row.count(expert) for row in rows) / sum(map(len, rows))
        want += share * sum(row[expert] / sum(row) for row in scores) / 60
    assert auxiliary_loss(choice.probabilities, choice.experts, over).item() == pytest.approx(12 * want, rel=1e-5)


def test_an_even_load_has_a_loss_of_one():
    logits = torch.eye(12).repeat(5, 1)
    choice = choice_of(logits, replace(PLAIN, top_k=1))
    assert auxiliary_loss(choice.probabilities, choice.experts).item() == pytest.approx(1)


def test_the_loss_makes_the_load_more_even():
    logits = uneven_logits(200, 12).requires_grad_()
    choice = choice_of(logits, PLAIN)
    auxiliary_loss(choice.probabilities, choice.experts).backward()
    after = choice_of((logits - 500 * logits.grad).detach(), PLAIN)
    largest = [int(c.experts.flatten().bincount().max()) for c in (choice, after)]
    assert largest[1] < 0.9 * largest[0]


def test_losses_equal_those_of_transformers():
    logits = uneven_logits(90, 12)
    choice = choice_of(logits, PLAIN)
    mixtral = load_balancing_loss_func((logits,), 12, 3)
    assert_close(3 * auxiliary_loss(choice.probabilities, choice.experts), mixtral, "Mixtral", 1e-6)
    first = choice.experts[:, :1]
    theirs = switch.load_balancing_loss_func(choice.probabilities.unsqueeze(0), first.unsqueeze(0))
    assert_close(auxiliary_loss(choice.probabilities, first), theirs, "Switch", 1e-6)
    assert_close(z_loss(logits), torch.as_tensor(switch.router_z_loss_func(logits.unsqueeze(0))), "z-loss", 1e-6)


def test_the_z_loss_is_its_formula():
    logits = uneven_logits(40, 12).double().tolist()
    want = sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits) / 40
    assert float(z_loss(uneven_logits(40, 12))) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_and_extreme_logits_give_numbers(size, score):
    logits = torch.full((6, 12), size)
    logits[3:, ::2] = -size
    logits.requires_grad_()
    config = replace(PLAIN, score=score, aux_loss=0.01, z_loss=1e-3)
    loss = router_loss(choice_of(logits, config), config)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_without_tokens_losses_are_zero_and_the_graph_is_whole(config):
    config = replace(config, aux_loss=0.01, z_loss=1e-3)
    model = router(config)
    loss = router_loss(model(tokens(0)), config)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


def test_what_a_layer_adds():
    config = replace(PLAIN, aux_loss=0.02, z_loss=1e-3, balance_over="first")
    choice = choice_of(uneven_logits(50, 12), config)
    want = 0.02 * auxiliary_loss(choice.probabilities, choice.experts, "first") + 1e-3 * z_loss(choice.logits)
    assert_close(router_loss(choice, config), want)
    assert float(router_loss(choice, PLAIN)) == 0


def test_half_precision_is_summed_in_fp32():
    logits = uneven_logits(5000, 12)
    half = logits.bfloat16()
    choice = choice_of(logits, PLAIN)
    loss = auxiliary_loss(choice.probabilities.bfloat16(), choice.experts)
    assert z_loss(half).dtype == loss.dtype == torch.float32
    assert_close(z_loss(half), z_loss(half.double()), "z-loss", 1e-6)
