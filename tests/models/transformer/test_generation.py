"""What is generated from a cache, on several ranks and in a batch, is what one rank gives for each prompt without either."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import fused_ops
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.decoder import Decoder
from models.transformer.generation import Generated, generate
from models.transformer.model import Transformer
from models.transformer.sampling import Sampling
from models.transformer.step_split import split_step
from tests.models.transformer.parity import split, unsplit
from tests.models.transformer.small import GPT2, LLAMA
from tests.ranks import run_ranks, take_card

PROMPTS = [[3, 14, 15, 9, 26, 5], [8], [30, 1, 2], [7, 7]]
STEPS = 12


def model_of(config: TransformerConfig, comm: str = "fused", **options: bool) -> Transformer:
    group = dist.group.WORLD if dist.is_initialized() else None
    return split(unsplit(config), TensorParallel(group, comm=comm, **options))


@torch.no_grad()
def one_by_one(config: TransformerConfig, prompt: list[int], steps: int) -> list[int]:
    """Each token from a forward over all tokens before it, by the unsplit model in float64."""
    model, tokens = unsplit(config), list(prompt)
    for _ in range(steps):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def greedy(config: TransformerConfig) -> list[list[list[int]]]:
    found = []
    for comm in ("fused", "baseline"):
        fused_ops.reset_counters()
        found.append(generate(model_of(config, comm), PROMPTS, max_new_tokens=STEPS).tokens)
        backends = {backend for _, backend, _ in fused_ops.counters()}
        assert backends == ({"host" if comm == "fused" else comm} if dist.is_initialized() else set())
    return found


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_greedy_takes_the_likeliest_of_a_forward_over_everything(config):
    want = [one_by_one(config, prompt, STEPS) for prompt in PROMPTS]
    assert len({token for row in want for token in row}) > 5, "the models say the same always, which shows nothing"
    assert greedy(config) == [want, want]
    for found in run_ranks(2, greedy, config):
        assert found == [want, want]


def greedy_of_a_model_that_was_trained_sequence_parallel() -> list[list[int]]:
    return generate(model_of(LLAMA, sequence_parallel=True), PROMPTS, max_new_tokens=3).tokens


def test_four_ranks():
    want = [one_by_one(LLAMA, prompt, 3) for prompt in PROMPTS]
    assert run_ranks(4, greedy_of_a_model_that_was_trained_sequence_parallel) == [want] * 4


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_steps_as_a_cuda_graph_takes_them_give_the_same(config):
    want = generate(model_of(config), PROMPTS, max_new_tokens=STEPS).tokens
    decoder = Decoder(model_of(config), PROMPTS, STEPS, Sampling(), None, static=True)
    decoder.prefill()
    for _ in range(STEPS - 1):
        decoder.step()
    assert decoder.generated.tolist() == want


def test_a_sequence_ends_with_its_stop_token_and_stays_ended():
    whole = generate(model_of(LLAMA), PROMPTS, max_new_tokens=STEPS).tokens
    stop = whole[0][4]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert generate(model_of(LLAMA), PROMPTS, max_new_tokens=STEPS, stop_token=stop).tokens == cut
    decoder = Decoder(model_of(LLAMA), PROMPTS, STEPS, Sampling(), stop, static=False)
    decoder.prefill()
    for _ in range(STEPS - 1):
        decoder.step()
    for row, ended in zip(decoder.generated.tolist(), cut, strict=True):
        assert row == ended + [stop] * (STEPS - len(ended))
    assert decoder.finished.tolist() == [stop in row for row in whole]


def stopped() -> tuple[list[list[int]], int]:
    result = generate(model_of(LLAMA), PROMPTS[:1], max_new_tokens=1000, stop_token=stop_of_the_first())
    return result.tokens, len(result.step_ms)


def stop_of_the_first() -> int:
    return one_by_one(LLAMA, PROMPTS[0], 4)[3]


def test_generation_stops_when_all_have():
    tokens, steps = stopped()
    assert tokens[0][-1] == stop_of_the_first()
    assert steps == len(tokens[0]) - 1 <= 3
    assert run_ranks(2, stopped) == [(tokens, steps)] * 2


def test_one_token_needs_no_step():
    result = generate(model_of(LLAMA), PROMPTS, max_new_tokens=1)
    assert [len(row) for row in result.tokens] == [1] * 4
    assert result.step_ms == []
    assert result.prefill_ms > 0
    assert not result.cuda_graph


def sampled() -> list[list[list[int]]]:
    options = [{"temperature": 0.8}, {"temperature": 1.5, "top_k": 9}, {"temperature": 1.0, "top_p": 0.7, "seed": 3}]
    return [generate(model_of(LLAMA), PROMPTS, max_new_tokens=STEPS, **some).tokens for some in options]


def test_sampling_is_the_same_on_all_ranks_and_any_number_of_them():
    alone = sampled()
    assert sampled() == alone
    assert alone[0] != alone[1] != alone[2]
    # Logits differ between numbers of ranks by rounding: too little for these draws.
    assert run_ranks(2, sampled) == [alone, alone]


def test_another_seed_gives_other_tokens():
    first, second = (
        generate(model_of(LLAMA), PROMPTS, max_new_tokens=STEPS, temperature=1.0, seed=seed).tokens for seed in (0, 1)
    )
    assert first != second


def many() -> Generated:
    return generate(model_of(LLAMA), [[n % 37] * (1 + n % 5) for n in range(64)], max_new_tokens=5)


def test_a_batch_of_64_gives_what_each_prompt_gives_alone():
    together = many()
    for n in (0, 17, 63):
        alone = generate(model_of(LLAMA), [[n % 37] * (1 + n % 5)], max_new_tokens=5)
        assert together.tokens[n] == alone.tokens[0]
    assert [result.tokens for result in run_ranks(2, many)] == [together.tokens] * 2


def half_precision() -> list[list[int]]:
    return generate(model_of(LLAMA).bfloat16(), PROMPTS, max_new_tokens=4, temperature=1.0).tokens


def test_ranks_agree_in_bfloat16():
    first, second = run_ranks(2, half_precision)
    assert first == second


def different_input() -> list[str]:
    said = []
    model, rank = model_of(LLAMA), dist.get_rank()
    for prompts, options in (
        ([[1, 2 + rank]], {}),
        ([[1]], {"temperature": 1.0, "seed": rank}),
        ([[1]], {"max_new_tokens": 3 + rank}),
        ([[1]] if rank else [[1], []], {}),
    ):
        with pytest.raises(ValueError, match=r".") as refused:
            generate(model, prompts, **{"max_new_tokens": 3, **options})
        said.append(str(refused.value))
    assert len(generate(model, [[1]], max_new_tokens=2).tokens[0]) == 2, "refusals leave the ranks in step"
    return said


def test_ranks_that_were_given_different_things_are_all_told():
    first, second = run_ranks(2, different_input)
    assert (
        first[:3]
        == second[:3]
        == ["ranks [1] were given other prompts or options than rank 0; all must be given the same"] * 3
    )
    assert first[3] == "prompt 1 is empty; it needs at least one token"
    assert second[3] == f"rank 0: {first[3]}"


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 41]], {}, "prompt 0 has token 41, outside the vocabulary of 41"),
        ([[-1]], {}, "prompt 0 has token -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"stop_token": 41}, "stop_token is 41"),
        ([[1]], {"top_k": 3}, "mean nothing with temperature=0"),
        ([[1]], {"use_cuda_graph": True}, "the model is on cpu"),
        ([[1]], {"use_cuda_graph": "maybe"}, "allowed: True, False, 'auto'"),
        ([[1] * 30], {}, "a prompt of 30 tokens and 4 more need 33 positions, and the model has 32 learned ones"),
    ],
)
def test_bad_input(prompts, options, said):
    with pytest.raises(ValueError, match=said):
        generate(model_of(GPT2), prompts, **{"max_new_tokens": 4, **options})


def test_all_learned_positions_can_be_filled():
    assert len(generate(model_of(GPT2), [[1] * 30], max_new_tokens=3).tokens[0]) == 3


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_an_error_and_no_token(temperature, bad):
    model = model_of(LLAMA)
    with torch.no_grad():
        model.norm.weight[0] = float(bad)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        generate(model, PROMPTS, max_new_tokens=4, temperature=temperature)


def test_a_graph_is_refused_where_steps_have_many_shapes():
    with pytest.raises(ValueError, match="static=True"):
        Decoder(model_of(LLAMA), PROMPTS, 3, Sampling(), None, static=False).capture()


def graph_and_eager(comm: str) -> None:
    device = take_card()
    config = dataclasses.replace(LLAMA, width=64, head_dim=16, ffn=96)
    model = model_of(config, comm).to(device)
    for options in ({}, {"temperature": 1.0, "top_p": 0.9}, {"stop_token": 5}):
        eager = generate(model, PROMPTS, max_new_tokens=20, use_cuda_graph=False, **options)
        graph = generate(model, PROMPTS, max_new_tokens=20, **options)
        assert graph.cuda_graph
        assert graph.tokens == eager.tokens
    split = split_step(model, PROMPTS, steps=5)
    assert 0 < split.gemv_ms < split.step_ms
    assert 0 < split.rest_ms < split.step_ms


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "comm"), [(1, "fused"), (2, "fused"), (2, "baseline")])
def test_a_cuda_graph_gives_what_single_calls_give(world, comm):
    if torch.cuda.device_count() < world:
        pytest.skip("embedding and logits go through NCCL, which wants a card a rank")
    run_ranks(world, graph_and_eager, comm, backend="cpu:gloo,cuda:nccl", timeout=240)
