"""Equal to `transformers`: Llama folders loaded over several ranks, and GPT-2 with its weights in our layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from models.parallel.shards import load_full
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.huggingface import llama_config, load_llama
from models.transformer.model import Transformer
from tests.models.close import assert_close
from tests.ranks import run_ranks

TOKENS = torch.randint(0, 37, (2, 40), generator=torch.Generator().manual_seed(0))
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads, scaled rotation": {"head_dim": 8, "rope_parameters": LLAMA3_ROPE},
}


def make(folder: Path, max_shard_size: str = "5GB", **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Saves a random Llama; returns its logits, its loss a token, and the gradient of its first key projection."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        **options,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    logits = model.double()(TOKENS).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten(), reduction="none")
    losses.sum().backward()
    return logits.detach(), losses.detach().view_as(TOKENS), model.model.layers[0].self_attn.k_proj.weight.grad


def load(folder: Path, sequence_parallel: bool) -> Transformer:
    group = dist.group.WORLD if dist.is_initialized() else None
    model = Transformer(llama_config(folder), TensorParallel(group, sequence_parallel=sequence_parallel))
    load_llama(model, folder)
    return model


def compare(folder: Path, logits: torch.Tensor, losses: torch.Tensor, key_gradient: torch.Tensor) -> None:
    for sequence_parallel in (False, True):
        model = load(folder, sequence_parallel)
        assert_close(model.logits(TOKENS), logits, "logits", tolerance=2e-5)
        got = model(TOKENS, TOKENS.roll(-1, 1))
        assert_close(got, losses, "losses", tolerance=2e-5)
        got.sum().backward()
        attention, tp = model.blocks[0].attention, model.tp
        groups = attention.qkv.weight.grad.unflatten(0, (attention.kv_heads, -1, attention.head_dim))
        want = key_gradient.unflatten(0, (-1, attention.head_dim)).chunk(tp.world)[tp.rank]
        assert_close(groups[:, -2], want, "gradient of the key projection", tolerance=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_equals_transformers(variant, tmp_path):
    expected = make(tmp_path, **VARIANTS[variant])
    compare(tmp_path, *expected)
    run_ranks(2, compare, tmp_path, *expected)


def test_llama_in_several_files_on_four_ranks(tmp_path):
    expected = make(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    run_ranks(4, compare, tmp_path, *expected)


def test_older_config_files_say_the_same(tmp_path):
    make(tmp_path, **VARIANTS["wide heads, scaled rotation"])
    new = llama_config(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["rope_scaling"] = values.pop("rope_parameters")
    values["rope_theta"] = values["rope_scaling"].pop("rope_theta")
    path.write_text(json.dumps(values))
    assert llama_config(tmp_path) == new


def elements_read(folder: Path) -> tuple[int, int]:
    """(elements that this rank read, those in the file)."""
    import safetensors

    count = 0

    class Counting:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            part = self.file.get_slice(name)

            class Part:
                def get_shape(self):
                    return part.get_shape()

                def __getitem__(self, index):
                    nonlocal count
                    values = part[index]
                    count += values.numel()
                    return values

            return Part()

    safetensors.safe_open = Counting
    load(folder, sequence_parallel=False)
    return count, sum(t.numel() for t in load_file(folder / "model.safetensors").values())


def test_a_rank_reads_its_own_part_alone(tmp_path):
    make(tmp_path)
    norms = 5 * 32
    (first, total), (second, _) = run_ranks(2, elements_read, tmp_path)
    assert first + second == total + norms


def broken(folder: Path, **changes) -> Path:
    target = folder.with_name(f"{folder.name}_broken")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target


def test_what_cannot_be_loaded_is_refused(tmp_path):
    folder = tmp_path / "llama"
    make(folder)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        llama_config(tmp_path)
    for changes, words in (
        ({"model_type": "mamba"}, "model_type is 'mamba'; only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; allowed: default, llama3"),
    ):
        with pytest.raises(ValueError, match=words):
            llama_config(broken(folder, **changes))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(37, 32\), the config says \(38, 32\)"):
        load(broken(folder, vocab_size=38), sequence_parallel=False)
    with pytest.raises(ValueError, match=r"missing \['model.layers.2"):
        load(broken(folder, num_hidden_layers=3), sequence_parallel=False)
    with pytest.raises(ValueError, match=r"without a place \['model.layers.1"):
        load(broken(folder, num_hidden_layers=1), sequence_parallel=False)
    target = broken(folder)
    (target / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(target, sequence_parallel=False)


def test_files_of_fp16_load_into_fp32(tmp_path):
    logits, _, _ = make(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file)
    model = load(tmp_path, sequence_parallel=False)
    assert model.norm.weight.dtype == torch.float32
    assert_close(model.logits(TOKENS), logits, tolerance=5e-2)


def gpt2_equal(weights: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
    config = TransformerConfig(layers=2, width=20, heads=5, vocabulary=37, max_length=40)
    model = Transformer(config, TensorParallel(dist.group.WORLD))
    load_full(model, weights)
    assert_close(model.logits(TOKENS), logits, "logits", tolerance=2e-5)


def test_gpt2_equals_transformers():
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_positions=40, n_embd=20, n_layer=2, n_head=5, initializer_range=0.2)
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    state = theirs.transformer.state_dict()
    table = torch.zeros(128, 20)
    table[:37] = state["wte.weight"]
    ours = {"embedding.weight": table, "positions.weight": state["wpe.weight"]}
    ours |= {f"norm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for layer in range(2):
        there, here = f"h.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            ours[f"{here}.attention_norm.{kind}"] = state[f"{there}.ln_1.{kind}"]
            ours[f"{here}.mlp_norm.{kind}"] = state[f"{there}.ln_2.{kind}"]
            # Conv1D's weights are [in, out]; all queries, all keys, all values become one group a head.
            qkv = state[f"{there}.attn.c_attn.{kind}"].mT if kind == "weight" else state[f"{there}.attn.c_attn.{kind}"]
            ours[f"{here}.attention.qkv.{kind}"] = qkv.unflatten(0, (3, 5, 4)).transpose(0, 1).flatten(0, 2)
            for name, conv in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                value = state[f"{there}.{conv}.{kind}"]
                ours[f"{here}.{name}.{kind}"] = value.mT if kind == "weight" else value
    ours = {name: value.detach().clone() for name, value in ours.items()}
    logits = theirs.double()(TOKENS).logits.detach()
    run_ranks(2, gpt2_equal, ours, logits)
