"""What is dropped: against a loop over rows, and against DeepSpeed, which it must equal row for row."""

import math
from dataclasses import replace

import pytest
import torch
from deepspeed.moe import sharded_moe

from models.moe.capacity import capacity, kept_rows
from models.moe.losses import auxiliary_loss
from models.moe.routing import route
from tests.models.close import assert_close
from tests.models.moe.cases import PLAIN, choice_of, uneven_logits

TOKENS = (1, 7, 8, 50, 333)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "factor", "minimum", "want"),
    [
        (100, 1, 8, 1.25, 8, 16),
        (100, 2, 8, 1.25, 8, 32),
        (64, 2, 8, 1.0, 8, 16),
        (10, 1, 8, 1.0, 8, 8),
        (10, 1, 8, 1.0, 0, 2),
        (0, 2, 8, 2.0, 0, 0),
        (0, 2, 8, 2.0, 8, 8),
        (25, 1, 2, 1.2, 0, 15),  # and not 16, for which rounding would be to blame
        (1 << 40, 1, 1 << 10, 1.25, 8, 5 << 28),
    ],
)
def test_capacity(tokens, top_k, num_experts, factor, minimum, want):
    assert capacity(tokens, top_k, num_experts, factor, minimum) == want


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
def test_capacity_is_deepspeeds(factor):
    for num_experts, top_k in ((2, 1), (8, 2), (64, 6), (160, 6), (256, 8)):
        for tokens in (*range(1, 40), 1000, 4096, 12345):
            theirs = sharded_moe._capacity(
                torch.empty(tokens, num_experts, device="meta"), torch.tensor(factor * top_k), torch.tensor(4)
            )
            assert capacity(tokens, top_k, num_experts, factor, 4) == int(theirs)


@pytest.mark.parametrize("drop", ["probability", "position", "choice"])
@pytest.mark.parametrize("limit", [0, 1, 5, 20, 60])
def test_kept_rows_are_those_of_a_loop(drop, limit):
    choice = choice_of(uneven_logits(50, 12), PLAIN)
    experts, scores = choice.experts.tolist(), choice.scores.tolist()
    rows = [(t, c, experts[t][c]) for t in range(50) for c in range(3)]
    if drop == "probability":
        rows.sort(key=lambda row: -scores[row[0]][row[2]])
    elif drop == "choice":
        rows.sort(key=lambda row: row[1])
    taken, want = [0] * 12, torch.zeros(50, 3, dtype=torch.bool)
    for token, column, expert in rows:
        if taken[expert] < limit:
            taken[expert] += 1
            want[token, column] = True
    assert torch.equal(kept_rows(choice, limit, drop), want)


@pytest.mark.parametrize("drop", ["probability", "position", "choice"])
def test_of_equal_scores_the_first_tokens_stay(drop):
    choice = choice_of(torch.zeros(300, 4), replace(PLAIN, num_experts=4, top_k=1))
    assert kept_rows(choice, 9, drop).flatten().tolist() == [True] * 9 + [False] * 291


def test_an_order_that_is_none_is_refused():
    with pytest.raises(ValueError, match="drop is 'random'; allowed: probability, position, choice"):
        kept_rows(choice_of(torch.zeros(9, 12), PLAIN), 1, "random")


def combine_weights(config, logits):
    """[T, E]: each token's weight for each expert, 0 where it is dropped; and how many rows there are."""
    choice = choice_of(logits, config)
    routing = route(choice, config)
    experts = torch.repeat_interleave(torch.arange(config.num_experts), routing.counts)
    weights = torch.zeros_like(logits).index_put((routing.tokens, experts), routing.gates)
    assert routing.dropped_share == pytest.approx(1 - len(experts) / max(1, choice.experts.numel()))
    return weights, len(experts), auxiliary_loss(choice.probabilities, choice.experts, config.balance_over)


def check(config, logits, theirs):
    loss, combined, mask, _ = theirs
    weights, rows, own_loss = combine_weights(config, logits)
    assert torch.equal(weights > 0, mask.any(-1)), "other rows are kept"
    assert rows == int(mask.sum())
    assert_close(weights, combined.sum(-1), "gates", 1e-6)
    assert own_loss.item() == pytest.approx(float(loss), rel=1e-6)
    assert rows < len(logits) * config.top_k or len(logits) < 50, "nothing was dropped, which shows nothing"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_topk_equals_deepspeed(tokens, drop, top_k):
    renormalize = "none" if top_k == 1 else "kept"
    config = replace(
        PLAIN, top_k=top_k, renormalize=renormalize, drop=drop, capacity_factor=1.0, min_capacity=2, aux_loss=1.0
    )
    logits = uneven_logits(tokens, 12)
    policy = "probs" if drop == "probability" else drop
    theirs = sharded_moe.topkgating(logits.clone(), top_k, 1.0, 2, drop_policy=policy)
    if top_k == 1:  # whose gates DeepSpeed makes 1 here
        scores = logits.softmax(-1).unsqueeze(-1)
        theirs = (theirs[0], theirs[1] * scores, *theirs[2:])
    check(config, logits, theirs)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_top2_equals_deepspeed(tokens, factor):
    config = replace(
        PLAIN,
        top_k=2,
        renormalize="kept",
        drop="choice",
        capacity_factor=factor,
        min_capacity=2,
        aux_loss=1.0,
        balance_over="first",
    )
    logits = uneven_logits(tokens, 12)
    theirs = sharded_moe.top2gating(logits.clone(), factor, 2, top2_2nd_expert_sampling=False)
    check(config, logits, theirs)


@pytest.mark.parametrize("tokens", TOKENS[1:])  # it refuses fewer tokens than the least capacity
@pytest.mark.parametrize("drop", ["probability", "position"])
def test_top1_equals_deepspeed(tokens, drop, monkeypatch):
    """Which keeps rows at random; here the numbers it draws are the priorities that it is compared under."""
    logits = uneven_logits(tokens, 12)
    first = torch.arange(tokens, 0, -1).unsqueeze(1).expand(tokens, 12).float()
    priorities = logits.softmax(-1) if drop == "probability" else first
    monkeypatch.setitem(sharded_moe.exp_selection_uniform_map, logits.device, lambda shape: priorities)
    config = replace(PLAIN, top_k=1, drop=drop, capacity_factor=1.0, min_capacity=2, aux_loss=1.0)
    check(config, logits, sharded_moe.top1gating(logits.clone(), 1.0, 2))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_dropless_equals_deepspeed(top_k):
    config = replace(PLAIN, top_k=top_k, renormalize="none" if top_k == 1 else "chosen")
    logits = uneven_logits(333, 12)
    if top_k == 1:
        theirs = sharded_moe.top1gating(logits.clone(), 1.0, 2, drop_tokens=False)
    else:
        theirs = sharded_moe.topkgating(logits.clone(), top_k, 1.0, 2, drop_tokens=False)
    weights, rows, _ = combine_weights(config, logits)
    assert rows == 333 * top_k
    assert_close(weights, theirs[1].sum(-1), "gates", 1e-6)


def test_gates_of_kept_rows_add_up_to_the_scaling():
    config = replace(PLAIN, renormalize="kept", drop="choice", capacity_factor=0.5, min_capacity=1, scaling=3.0)
    weights, _, _ = combine_weights(config, uneven_logits(100, 12))
    sums = weights.sum(-1)
    assert all(math.isclose(s, 3.0, rel_tol=1e-5) or s == 0 for s in sums.tolist())
    assert (sums == 0).any(), "no token lost all of its experts, which shows nothing"
