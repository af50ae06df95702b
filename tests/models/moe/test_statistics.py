"""Statistics of routings whose evenness is known."""

import math
from dataclasses import replace

import pytest
import torch

from models.moe.routing import route
from models.moe.statistics import Statistics, load_per_expert, statistics
from tests.models.moe.cases import PLAIN, choice_of, uneven_logits


def of(logits: torch.Tensor, **options) -> Statistics:
    config = replace(PLAIN, **options)
    choice = choice_of(logits, config)
    return statistics(choice, route(choice, config))


def test_an_even_load_of_certain_tokens():
    found = of(1e4 * torch.eye(12).repeat(3, 1), top_k=1)
    assert found.load.tolist() == [3] * 12
    assert found.dropped_share == 0
    assert float(found.entropy) == pytest.approx(0, abs=1e-6)
    assert float(found.load_entropy) == pytest.approx(math.log(12))
    assert float(found.imbalance) == pytest.approx(1)


def test_one_expert_has_it_all():
    found = of(torch.zeros(30, 12), top_k=1, drop="position", capacity_factor=1.0, min_capacity=1)
    assert found.load.tolist() == [30] + [0] * 11, "before any is dropped"
    assert found.dropped_share == pytest.approx(27 / 30)
    assert float(found.entropy) == pytest.approx(math.log(12))
    assert float(found.load_entropy) == 0
    assert float(found.imbalance) == pytest.approx(12)


def test_some_load():
    logits = uneven_logits(100, 12)
    found = of(logits)
    load = [int((logits.topk(3).indices == e).sum()) for e in range(12)]
    assert found.load.tolist() == load
    assert float(found.imbalance) == pytest.approx(max(load) / 25)
    assert float(found.load_entropy) == pytest.approx(-sum(n / 300 * math.log(n / 300) for n in load if n))
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    assert float(found.entropy) == pytest.approx(float(entropies.mean()), rel=1e-5)


def test_no_tokens():
    found = of(torch.zeros(0, 12))
    assert found.load.tolist() == [0] * 12
    assert [float(x) for x in (found.dropped_share, found.entropy, found.load_entropy, found.imbalance)] == [0] * 4


def test_load_of_a_choice_of_any_shape():
    assert load_per_expert(torch.tensor([[2, 0], [2, 2]]), 4).tolist() == [1, 0, 3, 0]
