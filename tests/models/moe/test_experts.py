"""The loop over experts against a loop over tokens, and Mixtral's layer of `transformers`."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from models.moe.experts import dense_loop
from models.moe.routing import route
from tests.models.close import assert_close
from tests.models.moe.cases import MODES, PLAIN, choice_of, router, tokens, uneven_logits

CAPPED = replace(PLAIN, drop="position", capacity_factor=0.5, min_capacity=1)


def weights(activation: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    lead = (12, 2, 10) if activation == "swiglu" else (12, 10)
    w1 = torch.randn(*lead, 16, generator=generator) * 0.3
    w2 = torch.randn(12, 16, 10, generator=generator) * 0.3
    return w1.to(dtype).requires_grad_(), w2.to(dtype).requires_grad_()


def by_token(input, choice, kept, w1, w2, activation):
    rows = []
    for t in range(len(input)):
        row = torch.zeros_like(input[t])
        for c, e in enumerate(choice.experts[t].tolist()):
            if kept is None or kept[t, c]:
                if activation == "swiglu":
                    hidden = F.silu(w1[e, 0] @ input[t]) * (w1[e, 1] @ input[t])
                else:
                    hidden = F.gelu(w1[e] @ input[t], approximate="tanh")
                row = row + choice.gates[t, c] * (w2[e] @ hidden)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("config", [*MODES.values(), CAPPED], ids=[*MODES, "capped"])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(config, activation):
    found = []
    for dtype in (torch.float32, torch.float64):
        model, input = router(config).to(dtype), tokens(25).to(dtype).requires_grad_()
        w1, w2 = weights(activation, dtype)
        choice = model(input)
        routing = route(choice, config)
        if dtype == torch.float32:
            output = dense_loop(input, routing, w1, w2, activation)
        else:
            output = by_token(input, choice, routing.kept, w1, w2, activation)
        output.square().sum().backward()
        found.append((output, input.grad, model.weight.grad, w1.grad, w2.grad))
    names = ("output", "input", "router", "w1", "w2")
    for name, got, want in zip(names, *found, strict=True):
        assert_close(got, want, name, 1e-5)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_experts_without_tokens_have_zero_gradients(count, activation):
    logits = torch.zeros(count, 12)
    logits[:, [3, 7, 8]] = 1
    routing = route(choice_of(logits, PLAIN), PLAIN)
    w1, w2 = weights(activation)
    input = tokens(count).requires_grad_()
    output = dense_loop(input, routing, w1, w2, activation)
    assert output.shape == (count, 16)
    output.square().sum().backward()
    assert input.grad.shape == input.shape
    for weight in (w1, w2):
        busy = weight.grad.flatten(1).abs().amax(1) > 0
        assert busy.nonzero().flatten().tolist() == ([3, 7, 8] if count else [])


def test_dropped_tokens_get_zeros():
    choice = choice_of(uneven_logits(100, 12), CAPPED)
    routing = route(choice, CAPPED)
    output = dense_loop(tokens(100), routing, *weights("swiglu"), "swiglu")
    lost = ~routing.kept.any(1)
    assert lost.any()
    assert torch.equal(output.abs().amax(1) == 0, lost)


def test_half_precision_keeps_its_dtype_and_is_summed_in_fp32():
    config = MODES["softmax, all experts"]
    routing = route(router(config)(tokens(25)), config)
    w1, w2 = weights("swiglu", torch.bfloat16)
    output = dense_loop(tokens(25).bfloat16(), routing, w1, w2, "swiglu")
    want = dense_loop(tokens(25).bfloat16().double(), routing, w1.double(), w2.double(), "swiglu")
    assert output.dtype == torch.bfloat16
    assert_close(output, want, "output", 1e-2)


def test_mixtral_equals_transformers():
    theirs = MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=16, intermediate_size=10, num_local_experts=12, num_experts_per_tok=3)
    )
    config = replace(PLAIN, renormalize="chosen")
    model, input = router(config), tokens(60)
    w1, w2 = weights("swiglu")
    theirs.load_state_dict(
        {"gate.weight": model.weight, "experts.gate_up_proj": w1.flatten(1, 2), "experts.down_proj": w2}
    )
    theirs.train()
    want = theirs(input.view(3, 20, 16).clone()).view(60, 16)
    got = dense_loop(input, route(model(input), config), w1, w2, "swiglu")
    assert_close(got, want, "output", 1e-5)
    got.square().sum().backward()
    want.square().sum().backward()
    assert_close(model.weight.grad, theirs.gate.weight.grad, "router", 1e-5)
    assert_close(w1.grad.flatten(1, 2), theirs.experts.gate_up_proj.grad, "w1", 1e-5)
    assert_close(w2.grad, theirs.experts.down_proj.grad, "w2", 1e-5)
