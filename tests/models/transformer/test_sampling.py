"""Tokens are drawn with the probabilities they should be, among the tokens they should be."""

import math

import pytest
import torch

from models.transformer.sampling import Sampling, choose, weights

TEMPERATURES = (0.3, 1.0, 2.5)


def some_logits(batch: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def reference(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities of one sequence's tokens in float64, token by token; no two logits are equal."""
    probabilities = (row.double() / sampling.temperature).softmax(0)
    order = row.argsort(descending=True).tolist()
    kept = order[: sampling.top_k or len(order)]
    if sampling.top_p is not None:
        whole = sum(float(probabilities[token]) for token in kept)
        sofar, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            sofar += float(probabilities[token])
            if sofar >= sampling.top_p * whole:
                break
        kept = nucleus
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (1, None), (7, None), (500, None), (None, 0.9), (7, 0.6)])
def test_probabilities(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    logits = some_logits(5, 101)
    drawn_by = weights(logits, sampling)
    got = drawn_by / drawn_by.sum(-1, keepdim=True).double()
    for row, probabilities in zip(logits, got, strict=True):
        want = reference(row, sampling)
        assert ((probabilities > 0) == (want >= want.max() * 2**-40)).all()
        torch.testing.assert_close(probabilities, want, rtol=0, atol=1e-6)


def test_tokens_come_as_often_as_they_are_likely():
    count = 4000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # evenly spread, so no luck is needed
    logits = some_logits(1, 23)
    for sampling in (Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.4, top_p=0.8)):
        tokens = choose(logits.expand(count, -1), sampling, draws)
        often = torch.bincount(tokens, minlength=23)
        assert ((often - reference(logits[0], sampling) * count).abs() <= 1.01).all()


def test_the_smallest_and_the_largest_draw_take_tokens_that_are_allowed():
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    logits = some_logits(1, 50)
    for sampling in (Sampling(1.0), Sampling(0.5, top_k=3), Sampling(1.0, top_p=0.4)):
        allowed = reference(logits[0], sampling).nonzero().flatten()
        assert choose(logits.expand(2, -1), sampling, draws).tolist() == [int(allowed[0]), int(allowed[-1])]


def test_equal_logits_at_the_edge_are_all_taken():
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    assert (weights(logits, Sampling(1.0, top_k=2)) > 0).tolist() == [[True, True, True, False, True]]
    assert (weights(logits, Sampling(1.0, top_p=0.8)) > 0).tolist() == [[True, True, True, False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_likeliest(dtype):
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], dtype=dtype)
    assert choose(logits, Sampling(), torch.zeros(2)).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes(dtype):
    draws = torch.tensor([0.3, 0.9999], dtype=torch.float64)
    logits = torch.tensor([[1e30, -1e30, 0.0], [float("-inf"), 0.25, float("-inf")]], dtype=dtype)
    for sampling in (
        Sampling(1.0),
        Sampling(1e-30),
        Sampling(5e-324),
        Sampling(1e300, top_k=1),
        Sampling(1.0, None, 1e-9),
    ):
        assert choose(logits, sampling, draws).tolist() == [0, 1]
    flat = weights(some_logits(1, 9), Sampling(1e9))
    assert int(flat.max() - flat.min()) < flat.max() / 1000


def test_a_vocabulary_of_millions_does_not_overflow():
    drawn_by = weights(torch.zeros(1, 1 << 21), Sampling(1.0, top_p=0.999))
    assert (drawn_by > 0).all()
    token = choose(torch.zeros(1, 1 << 21), Sampling(1.0), torch.tensor([0.75], dtype=torch.float64))
    assert token.tolist() == [3 << 19]


def test_draws_depend_on_the_seed_and_more_steps_begin_alike():
    few, many = Sampling(1.0, seed=5).draws(3, 17), Sampling(1.0, seed=5).draws(9, 17)
    assert few.dtype == torch.float64
    assert torch.equal(few, many[:3])
    assert (many >= 0).all()
    assert (many < 1).all()
    assert not torch.equal(few, Sampling(1.0, seed=6).draws(3, 17))
    assert len(many.unique()) == many.numel()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((-1.0,), "temperature is -1.0; it must be 0 "),
        ((math.inf,), "temperature is inf"),
        ((math.nan,), "temperature is nan"),
        ((1.0, 0), "top_k is 0; it must be at least 1"),
        ((1.0, None, 0.0), "top_p is 0.0; it must be above 0"),
        ((1.0, None, 1.1), "top_p is 1.1"),
        ((1.0, None, math.nan), "top_p is nan"),
        ((0.0, 5), "mean nothing with temperature=0"),
        ((0.0, None, 0.5), "mean nothing with temperature=0"),
        ((1.0, None, None, -1), "seed is -1"),
    ],
)
def test_values_that_mean_nothing(values, said):
    with pytest.raises(ValueError, match=said):
        Sampling(*values)
