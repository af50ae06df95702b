"""`launch.generate` as users start it: texts, figures, one clear line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.generation import report as reports
from launch.generation.config import GenerateConfig, check
from models.transformer.generation import Generated
from models.transformer.step_split import StepSplit
from tests.launch.commands import PYTHON, TORCHRUN_OF_TWO, run
from trainers.config import CommConfig, ConfigError

ALONE = (*PYTHON[:-1], "launch.generate")
TWO_RANKS = (*TORCHRUN_OF_TWO[:-1], "launch.generate")
SHORT = ("prompts=['def ',import os]", "batch=3", "max_new_tokens=6", "split_steps=4", "stop=false", "out=report.json")


def generate(command: tuple[str, ...], *arguments: str, cwd: Path) -> tuple[list[str], dict[str, Any]]:
    done = run(command, *SHORT, *arguments, cwd=cwd, fake=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in cwd.iterdir()] == ["report.json"]
    report = json.loads((cwd / "report.json").read_text())
    (cwd / "report.json").unlink()
    return done.stdout.splitlines(), report


def test_ranks_and_both_ways_to_communicate_give_the_same_texts(tmp_path: Path) -> None:
    _, alone = generate(ALONE, "temperature=0.9", "seed=4", cwd=tmp_path)
    assert (alone["ranks"], alone["backend"], alone["link"]) == (1, None, None)
    for comm, backend in (("fused", "host"), ("baseline", "baseline")):
        printed, report = generate(TWO_RANKS, f"comm={comm}", "temperature=0.9", "seed=4", cwd=tmp_path)
        assert (report["ranks"], report["comm"], report["backend"]) == (2, comm, backend)
        assert report["tokens"] == alone["tokens"]
        assert [text["prompt"] for text in report["texts"]] == ["def ", "import os", "def "]
        assert [line.startswith(f"[{n}] ") for n, line in enumerate(printed[:1])] == [True]
        assert sum(" tokens/s: 18 new tokens for 3 sequences" in line for line in printed) == 1
        assert report["new_tokens"] == 18
        assert len(report["step_ms"]) == 5
        split = report["split"]
        assert split["gemv_ms"] + split["communication_ms"] + split["rest_ms"] == pytest.approx(split["step_ms"])
        assert min(split["gemv_ms"], split["communication_ms"], split["rest_ms"]) > 0
        assert report["architecture"]["layers"] == 4
        assert report["config"]["seed"] == 4
    calls = {row["operator"]: row["calls"] for row in report["counters"]}
    assert calls == {"gemm_all_reduce": 2 * 4 * 6}, "two a layer and forward"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("max_new_token=3", "unknown key 'max_new_token'"),
        ("model=dlrm_tiny", "model=dlrm_tiny is a dlrm; a transformer generates text"),
        ("top_k=3", "mean nothing with temperature=0"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(argument: str, said: str, tmp_path: Path) -> None:
    done = run(ALONE, argument, cwd=tmp_path, fake=False)
    assert done.returncode == 2
    assert done.stderr.startswith("launch.generate: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_help_is_readable(tmp_path: Path) -> None:
    done = run(ALONE, "--help", cwd=tmp_path, fake=False)
    assert done.returncode == 0
    for text in ("torchrun --nproc-per-node 2", "weights=random | noise | hf:DIR | run:DIR", "max_new_tokens"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


COMM = CommConfig(mode="fused", gemm_all_reduce="fused")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "fp8"}, "dtype=fp8 is not a choice (allowed: fp32, bf16)"),
    ({"device": "tpu"}, "device=tpu is not a choice"),
    ({"cuda_graph": "maybe"}, "cuda_graph=maybe is not a choice (allowed: auto, on, off)"),
    ({"cuda_graph": "on"}, "cuda_graph=on needs device=cuda"),
    ({"device": "cuda", "cuda_graph": "off"}, "set split_steps=0"),
    ({"ranks_per_gpu": 2}, "ranks_per_gpu=2 needs device=cuda"),
    ({"batch": 0}, "batch=0 must be at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ({"prompt_length": 0}, "prompt_length=0 must be at least 1"),
    ({"split_steps": -1}, "split_steps=-1 must be at least 0"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"top_p": 0.5}, "mean nothing with temperature=0"),
    ({"prompts": ["a"], "prompt_length": 3}, "prompts and prompt_length are given"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": ["a", ""]}, "has an empty text"),
    ({"prompts": ["a", "b"], "batch": 1}, "batch=1, and there are 2 prompts"),
    ({"prompt_file": "/not/there"}, "prompt_file=/not/there is no file"),
    ({"weights": "zeros"}, "weights=zeros is not a choice (allowed: random, noise, hf:<folder>"),
    ({"weights": "hf:"}, "weights=hf: is not a choice"),
    ({"weights": "random:x"}, "weights=random:x is not a choice"),
    ({"weights": "run:/not/there"}, "/not/there is no directory"),
    ({"tokenizer": "/not/there"}, "tokenizer=/not/there is neither"),
    ({"out": "/not/there/x.json"}, "out=/not/there/x.json is not a file in a directory"),
    ({"comm": CommConfig("x", gemm_all_reduce="x")}, "comm.gemm_all_reduce=x is not a choice"),
    ({"comm": CommConfig("fused", gemm_all_reduce="auto", require_fused=True)}, "comm.require_fused=true contradicts"),
    ({"comm": CommConfig("fused", gemm_all_reduce="fused", backend="x")}, "comm.backend=x is not a choice"),
    ({"comm": CommConfig("fused", gemm_all_reduce="fused", timeout_s=0)}, "comm.timeout_s=0 must be"),
]


@pytest.mark.parametrize(("values", "said"), BAD)
def test_what_cannot_be_is_said(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(GenerateConfig(**{"comm": COMM, **values}))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_defaults_are_allowed() -> None:
    check(GenerateConfig(COMM))


def test_figures() -> None:
    generated = Generated([[1, 2, 3, 4, 5], [1]], prefill_ms=40.0, step_ms=[90.0, 60.0, 5.0, 5.0], cuda_graph=True)
    found = reports.figures(generated, StepSplit.of(8.0, 4.0, 2.0, 2))
    assert found["new_tokens"] == 6
    assert found["tokens_per_s"] == pytest.approx(6 / 0.2)
    assert (found["token_ms_median"], found["token_ms_p90"]) == (5.0, 5.0), "the first two steps are left out"
    facts = {"texts": None, "batch": 2, "ranks": 4, "comm": "fused", "backend": "cuda", "link": "same-GPU"}
    printed = "\n".join(reports.lines({**found, **facts}))
    assert "5.000 ms a token (median; p90 5.000), prompts 40.0 ms, one CUDA graph a step" in printed
    assert (
        "4.000 ms a step of 2 more: GEMV 2.000 ms (50%), communication 1.000 ms (25%), rest 1.000 ms (25%)" in printed
    )


def test_a_single_token_has_no_time_a_token() -> None:
    found = reports.figures(Generated([[1]], prefill_ms=2.0, step_ms=[], cuda_graph=False), None)
    assert (found["token_ms_median"], found["token_ms_p90"], found["split"]) == (None, None, None)
    facts = {"texts": [{"prompt": "a\x1b[2J", "continuation": "b\n"}], "batch": 1, "ranks": 1, "backend": None}
    assert next(reports.lines({**found, **facts})) == "[0] a\\x1b[2Jb\n", "nothing moves a terminal's cursor"
