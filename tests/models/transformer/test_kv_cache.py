"""Decoding token by token from a KV cache gives the logits of one forward over everything."""

import pytest
import torch
import torch.distributed as dist

from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.model import Transformer
from tests.models.close import assert_close, assert_same_on_all_ranks
from tests.models.transformer.small import GPT2, LLAMA, batch
from tests.ranks import run_ranks


def model_of(config: TransformerConfig) -> Transformer:
    # Sequence parallel as it was trained: decoding is not.
    group = dist.group.WORLD if dist.is_initialized() else None
    model = Transformer(config, TensorParallel(group, sequence_parallel=True))
    model.initialize(3)
    return model


@torch.no_grad()
def decode(config: TransformerConfig, static: bool) -> None:
    model = model_of(config)
    tokens, _ = batch(config, 3, 11)
    want = model.logits(tokens)
    for prompt in (1, 6):
        cache = model.new_cache(3, 11, static=static)
        assert_close(model.logits(tokens[:, :prompt], cache=cache), want[:, :prompt], "prompt")
        for t in range(prompt, 9):
            got = model.logits(tokens[:, t : t + 1], cache=cache)
            assert_close(got, want[:, t : t + 1], f"token {t} after a prompt of {prompt}")
            assert_same_on_all_ranks(got)
        assert_close(model.logits(tokens[:, 9:], cache=cache), want[:, 9:], "several tokens at once")
        assert cache.lengths.tolist() == [11] * 3
        with pytest.raises(ValueError, match="holds 11 tokens a sequence; 11 are filled and 1 more came"):
            model.logits(tokens[:, :1], cache=cache)


@torch.no_grad()
def decode_prompts_of_unequal_lengths(config: TransformerConfig, static: bool) -> None:
    model = model_of(config)
    tokens, _ = batch(config, 3, 9)
    lengths = torch.tensor([5, 1, 3])
    want = model.logits(tokens)
    cache = model.new_cache(3, 12, static=static)
    got = model.logits(tokens[:, :5], cache=cache, at=lengths - 1)  # what is beyond a length is padding
    each = torch.arange(3)
    assert_close(got, want[each, lengths - 1], "last token of each prompt")
    cache.set_lengths(lengths)
    for step in range(4):
        at = lengths + step
        got = model.logits(tokens[each, at].unsqueeze(1), cache=cache)
        assert_close(got[:, 0], want[each, at], f"step {step}")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("function", [decode, decode_prompts_of_unequal_lengths])
def test_decoding_equals_one_forward_on_two_ranks(function, config, static):
    run_ranks(2, function, config, static)


def test_decoding_equals_one_forward_on_one_rank():
    decode(LLAMA, static=False)
    decode_prompts_of_unequal_lengths(GPT2, static=True)


def test_shape_of_a_rank():
    run_ranks(4, shapes)


def shapes():
    cache = model_of(LLAMA).new_cache(2, 7, dtype=torch.bfloat16)
    assert cache.keys.shape == cache.values.shape == (2, 2, 7, 1, 6)
    assert cache.keys.dtype == torch.bfloat16


def test_a_cache_of_another_dtype_serves():
    model = model_of(LLAMA)
    tokens, _ = batch(LLAMA, 2, 6)
    with torch.inference_mode():
        cache = model.new_cache(2, 6, dtype=torch.bfloat16)
        model.logits(tokens[:, :5], cache=cache)
        got = model.logits(tokens[:, 5:], cache=cache)
        assert got.dtype == torch.float32
        assert_close(got[:, 0], model.logits(tokens)[:, 5], tolerance=5e-2)


def test_misuse_is_one_clear_error():
    model = model_of(GPT2)
    tokens, _ = batch(GPT2, 2, 4)
    cache = model.new_cache(2, 8)
    with pytest.raises(ValueError, match=r"has no gradient; use torch.no_grad\(\)"):
        model.logits(tokens, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="the KV cache is for 2 sequences, and 1 came"):
            model.logits(tokens[:1], cache=cache)
        with pytest.raises(ValueError, match="leave them out"):
            model.logits(tokens, positions=tokens, cache=cache)
        with pytest.raises(ValueError, match="max_length is 33, and the model has 32 learned positions"):
            model.new_cache(1, 33)
        model.logits(tokens, cache=cache)
        for lengths in ([5, 1], [-1, 2], [1]):
            with pytest.raises(ValueError, match="each between 0 and the 4 written"):
                cache.set_lengths(torch.tensor(lengths))
