"""Rows sorted by expert say what the choice says."""

from dataclasses import replace

import pytest
import torch

from models.moe.routing import route
from tests.models.moe.cases import MODES, PLAIN, choice_of, router, tokens, uneven_logits

CAPPED = replace(PLAIN, drop="probability", capacity_factor=1.0, min_capacity=2)
CONFIGS = {**MODES, "capped": CAPPED, "capped, renormalised": replace(CAPPED, renormalize="kept")}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("count", [0, 1, 100])
def test_rows_are_sorted_by_expert_then_token(config, count):
    choice = router(config)(tokens(count))
    routing = route(choice, config)
    kept = torch.ones(count, config.top_k, dtype=torch.bool) if routing.kept is None else routing.kept
    rows = sorted((int(choice.experts[t, c]), int(t), int(c)) for t, c in kept.nonzero())
    assert routing.tokens.tolist() == [t for _, t, _ in rows]
    assert routing.tokens.dtype == routing.counts.dtype == torch.int64
    assert routing.counts.tolist() == [sum(e == expert for e, _, _ in rows) for expert in range(12)]
    assert routing.gates.dtype == torch.float32
    if config.renormalize != "kept":
        assert routing.gates.tolist() == [choice.gates[t, c].item() for _, t, c in rows]
    assert routing.dropped_share == pytest.approx(1 - len(rows) / max(1, count * config.top_k) if count else 0)
    if config is CAPPED and count == 100:
        assert routing.dropped_share > 0
        assert routing.counts.max() <= 25
    routing.gates.sum().backward()


@pytest.mark.parametrize("config", [MODES["softmax"], CAPPED, replace(CAPPED, renormalize="kept")])
def test_gates_of_routed_rows_reach_the_router_and_those_of_dropped_rows_do_not(config):
    logits = uneven_logits(100, 12).requires_grad_()
    routing = route(choice_of(logits, config), config)
    (routing.gates * torch.linspace(-1, 1, len(routing.gates))).sum().backward()
    reached = torch.zeros(100, dtype=torch.bool)
    reached[routing.tokens] = True
    assert (logits.grad[~reached] == 0).all()
    if config is CAPPED:
        assert (logits.grad[reached].abs().amax(1) > 0).all()
        assert not reached.all()


def test_a_choice_of_all_experts_routes_every_token_to_each():
    config = MODES["softmax, all experts"]
    routing = route(router(config)(tokens(9)), config)
    assert routing.counts.tolist() == [9] * 12
    assert routing.tokens.tolist() == list(range(9)) * 12


def test_a_capacity_that_holds_all_drops_nothing():
    config = replace(CAPPED, min_capacity=1000)
    logits = uneven_logits(100, 12)
    capped, dropless = route(choice_of(logits, config), config), route(choice_of(logits, PLAIN), PLAIN)
    assert torch.equal(capped.tokens, dropless.tokens)
    assert torch.equal(capped.gates, dropless.gates)
    assert capped.dropped_share == 0
    assert capped.kept.all()


def test_a_capacity_of_nothing_drops_all_and_keeps_the_graph():
    config = replace(CAPPED, min_capacity=0, capacity_factor=1e-9)
    logits = uneven_logits(100, 12).requires_grad_()
    routing = route(choice_of(logits, config), config)
    assert routing.counts.sum() == 12  # the ceiling of next to nothing is one row an expert
    empty = route(choice_of(logits[:0], config), config)
    assert len(empty.tokens) == 0
    (routing.gates.sum() + empty.gates.sum()).backward()
    assert logits.grad.isfinite().all()
