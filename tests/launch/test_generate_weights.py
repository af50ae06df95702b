"""`launch.generate` from a training run's checkpoint and from a Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.generation.checkpoint import load_weights, saved_architecture
from launch.generation.config import GenerateConfig
from launch.generation.prompts import make_prompts
from launch.generation.tokenizer import make_tokenizer
from launch.generation.weights import architecture_of, build
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.generation import generate
from models.transformer.model import Transformer
from tests.launch.commands import PYTHON, TORCHRUN_OF_TWO, environment, run
from tests.models.transformer.small import GPT2
from tests.ranks import run_ranks
from trainers.config import CommConfig, ConfigError
from trainers.data.text.tokenizer import ByteTokenizer, train_bpe

COMM = CommConfig(mode="fused", gemm_all_reduce="fused")
TEXTS = [f"def function_{n}(argument):\n    return argument + {n}\n" for n in range(60)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on two ranks, of a model with BPE tokens."""
    where = tmp_path_factory.mktemp("trained")
    (where / "text").mkdir()
    (where / "text" / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare = [sys.executable, "-m", "launch.prepare_text", "text", "--out", "data", "--tokenizer", "bpe"]
    done = subprocess.run(
        [*prepare, "--vocab-size", "280"], cwd=where, env=environment(fake=False), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    small = ["model=transformer_tiny", "model.layers=1", "model.width=32", "model.ffn=64", "model.vocabulary=280"]
    steps = ["trainer.steps=2", "trainer.checkpoint_every=2", "trainer.eval_batches=1", "trainer.warmup=0"]
    done = run(
        TORCHRUN_OF_TWO,
        *small,
        *steps,
        "data.path=data",
        "data.length=16",
        "data.batch_size=4",
        "hydra.run.dir=run",
        cwd=where,
        fake=False,
    )
    assert done.returncode == 0, done.stderr
    return where


def test_a_run_brings_its_model_and_its_tokenizer(trained: Path) -> None:
    more = ["prompts=[def function_]", "max_new_tokens=5", "stop=false", "split_steps=0", "out=report.json"]
    done = run((*PYTHON[:-1], "launch.generate"), "weights=run:run", *more, cwd=trained, fake=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((trained / "report.json").read_text())
    assert report["architecture"]["vocabulary"] == 280
    assert len(report["prompt_tokens"][0]) < len("def function_"), "BPE has longer tokens than bytes"
    assert report["texts"][0]["prompt"] == "def function_"
    config = GenerateConfig(COMM, weights=f"run:{trained / 'run'}")
    architecture = saved_architecture(str(trained / "run"))
    assert asdict(architecture) == report["architecture"]
    model = build(config, architecture, TensorParallel(), torch.device("cpu"))
    assert generate(model, report["prompt_tokens"], max_new_tokens=5).tokens == report["tokens"]
    untrained = build(GenerateConfig(COMM), architecture, TensorParallel(), torch.device("cpu"))
    assert not torch.equal(model.embedding.weight, untrained.embedding.weight)


@dataclass(frozen=True)
class Part(TensorParallel):
    """One of several ranks, as far as a model's layout goes: nothing that communicates."""

    of: int = 1
    number: int = 0

    @property
    def world(self) -> int:
        return self.of

    @property
    def rank(self) -> int:
        return self.number


def test_four_ranks_read_what_two_have_written(trained: Path) -> None:
    path = str(trained / "run" / "checkpoints" / "step_2")
    whole, *parts = (
        Transformer(saved_architecture(path), tp) for tp in (Part(), *(Part(of=4, number=n) for n in range(4)))
    )
    for model in (whole, *parts):
        load_weights(model, path)
    assert torch.equal(torch.cat([part.embedding.weight for part in parts]), whole.embedding.weight)
    joined = torch.cat([part.blocks[0].mlp.up.weight for part in parts], dim=1)
    assert torch.equal(joined, whole.blocks[0].mlp.up.weight)
    joined = torch.cat([part.blocks[0].attention.out.weight for part in parts], dim=1)
    assert torch.equal(joined, whole.blocks[0].attention.out.weight)


def test_what_a_run_lacks_is_said(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        saved_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no embedding.weight of shape \[42, 20\]"):
        load_weights(Transformer(GPT2), str(trained / "run"))
    fake = tmp_path / "step_1"
    fake.mkdir()
    (fake / "meta.json").write_text(json.dumps({"architecture": {"model.table_rows": [3]}}))
    with pytest.raises(ConfigError, match="the model there is no Transformer"):
        saved_architecture(str(fake))
    with pytest.raises(ConfigError, match=r"config.yaml, which would say the tokenizer, is not there; set tokenizer"):
        make_tokenizer(GenerateConfig(COMM, weights=f"run:{fake}"), 300)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM  # here, since the ranks of these tests need none of it

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    # No token ends its generation, since transformers pads what has ended.
    config = LlamaConfig(vocab_size=270, initializer_range=0.3, eos_token_id=None, bos_token_id=None, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_bpe(iter(TEXTS), 270).save(folder / "tokenizer.json")
    return folder


def from_folder(config: GenerateConfig, prompts: list[list[int]]) -> list[list[int]]:
    architecture = architecture_of(config)
    assert architecture is not None
    model = build(config, architecture, TensorParallel(dist.group.WORLD), torch.device("cpu"))
    return generate(model, prompts, max_new_tokens=10).tokens


def test_a_hugging_face_folder_says_what_transformers_says(llama: Path) -> None:
    from transformers import LlamaForCausalLM

    config = GenerateConfig(COMM, weights=f"hf:{llama}", prompts=["def function_1", "return"])
    tokenizer = make_tokenizer(config, 270)
    prompts = make_prompts(config, tokenizer, 270)
    theirs = LlamaForCausalLM.from_pretrained(llama)
    want = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert run_ranks(2, from_folder, config, prompts) == [want, want]


def test_a_tokenizer_of_more_tokens_than_the_model_has(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 270 tokens, and the model a vocabulary of 260"):
        make_tokenizer(GenerateConfig(COMM, weights=f"hf:{llama}"), 260)
    with pytest.raises(ConfigError, match=r"no token '<eos>' to end documents with; name one that it has"):
        make_tokenizer(GenerateConfig(COMM, tokenizer=str(llama), end_of_document="<eos>"), 300)


def test_prompts(tmp_path: Path) -> None:
    byte = ByteTokenizer()
    assert make_prompts(GenerateConfig(COMM, prompts=["ab", "é"], batch=3), byte, 257) == [
        [97, 98],
        [195, 169],
        [97, 98],
    ]
    (tmp_path / "prompts").write_text("x\nyz\n")
    from_file = GenerateConfig(COMM, prompt_file=str(tmp_path / "prompts"))
    assert make_prompts(from_file, byte, 257) == [[120], [121, 122]]
    from_file.batch = 1
    with pytest.raises(ConfigError, match="batch=1, and there are 2 prompts"):
        make_prompts(from_file, byte, 257)
    (tmp_path / "prompts").write_text("x\n\ny\n")
    with pytest.raises(ConfigError, match="has an empty line"):
        make_prompts(from_file, byte, 257)
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="prompts is not UTF-8 text"):
        make_prompts(from_file, byte, 257)
    drawn = GenerateConfig(COMM, prompt_length=5, batch=2)
    assert make_tokenizer(drawn, 9) is None
    prompts = make_prompts(drawn, None, 9)
    assert [len(prompt) for prompt in prompts] == [5, 5]
    assert 0 <= min(map(min, prompts)) <= max(map(max, prompts)) < 9


def test_noise_differs_where_ranks_hold_parts_only() -> None:
    config = GenerateConfig(COMM, weights="noise", dtype="bf16")
    first, second = (build(config, GPT2, Part(of=2, number=n), torch.device("cpu")) for n in range(2))
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert torch.equal(first.positions.weight, second.positions.weight)
    assert torch.equal(first.blocks[0].attention.out.bias, second.blocks[0].attention.out.bias)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    assert 0.1 < float(first.embedding.weight.detach().float().std()) < 0.3
