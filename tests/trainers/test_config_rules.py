"""Each rule refuses what it is for, in one line that says what is allowed, and lets a good config pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers import config_rules
from trainers.config import CommConfig, ConfigError, RunConfig
from trainers.config_rules import RULES, check, did_you_mean, implemented_backends
from trainers.dlrm.config import ClicksConfig, DLRMConfig


def good() -> RunConfig:
    return RunConfig(
        comm=CommConfig(
            mode="fused",
            embedding_all_to_all="fused",
            gemm_all_reduce="fused",
            gemm_reduce_scatter="fused",
            all_gather_gemm="fused",
        ),
        model=DLRMConfig(
            name="small", embedding_dim=8, table_rows=[10] * 26, bottom_mlp=[16, 8], top_mlp=[16, 1], interaction="dot"
        ),
        data=ClicksConfig(kind="random", batch_size=4),
    )


def changed(**values: Any) -> RunConfig:
    config = good()
    for key, value in values.items():
        node = config
        *path, last = key.split("__")
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, last), f"{key} is no key"
        setattr(node, last, value)
    return config


BASELINE = {"comm__mode": "baseline", "comm__embedding_all_to_all": "baseline"}
AUTO = {"comm__mode": "auto", "comm__embedding_all_to_all": "auto"}
BROKEN = [
    (
        "_choices",
        {"comm__mode": "fusd"},
        "comm.mode=fusd is not a choice (allowed: fused, baseline, auto); did you mean 'fused'?",
    ),
    ("_choices", {"data__kind": "cirteo"}, "did you mean 'criteo'?"),
    ("_choices", {"optim__name": "rowise_adagrad"}, "did you mean 'rowwise_adagrad'?"),
    ("_choices", {"optim__name": "lion"}, "allowed: sgd, adagrad, rowwise_adagrad, adam, adamw"),
    ("_choices", {"model__embedding_dtype": "bf16"}, "allowed: fp32, fp16"),
    ("_choices", {"model__out_of_range": "wrap"}, "allowed: error, clamp, hash"),
    ("_choices", {"logger__wandb_mode": "onlin"}, "did you mean 'online'?"),
    ("_ranges", {"data__batch_size": 0}, "data.batch_size=0 is too small; it must be at least 1"),
    ("_ranges", {"data__eval_batch_size": -1}, "data.eval_batch_size=-1"),
    ("_ranges", {"optim__accumulate": 0}, "optim.accumulate=0"),
    ("_ranges", {"optim__lr": 0.0}, "optim.lr=0.0 must be positive"),
    ("_ranges", {"optim__lr": float("nan")}, "must be positive and finite"),
    ("_ranges", {"optim__eps": -1.0}, "optim.eps=-1.0"),
    ("_ranges", {"comm__timeout_s": 0.0}, "comm.timeout_s=0.0"),
    ("_ranges", {"trainer__keep_checkpoints": 0}, "trainer.keep_checkpoints=0"),
    ("_ranges", {"dry_run_ranks": 0}, "dry_run_ranks=0"),
    ("_fused", {**BASELINE, "comm__require_fused": True}, "comm.require_fused=true contradicts comm=baseline"),
    ("_fused", {**AUTO, "comm__require_fused": True}, "comm.require_fused=true contradicts comm=auto; drop"),
    (
        "_fused",
        {"comm__embedding_all_to_all": "baseline", "comm__require_fused": True},
        "contradicts comm.embedding_all_to_all=baseline",
    ),
    ("_backend", {"comm__backend": "cuda"}, "comm.backend=cuda works on a GPU, and trainer.device is cpu"),
    ("_backend", {"comm__backend": "host", "trainer__device": "cuda"}, "comm.backend=host works on CPU tensors"),
    ("_backend", {**AUTO, "comm__backend": "host"}, "comm.backend=host contradicts comm.embedding_all_to_all=auto"),
    ("_schedule", {"optim__decay_start": 5}, "needs optim.decay_steps"),
    ("_schedule", {"optim__decay_start": 5, "optim__decay_steps": 5, "optim__warmup_steps": 9}, "comes before the end"),
    ("_resume", {"trainer__resume": "/no/such/place"}, "trainer.resume=/no/such/place is not a directory"),
    ("_shared_card", {"trainer__ranks_per_gpu": 2}, "trainer.ranks_per_gpu=2 is about GPUs, and trainer.device is cpu"),
    ("_choices", {"model__family": "gnn"}, "allowed: dlrm, transformer"),
    (
        "_choices",
        {"data__kind": "text"},
        "data=text is for another family: model small is a dlrm, which reads data=criteo or",
    ),
    ("_engine", {"engine__kind": "deepspeed"}, "engine=deepspeed does not train a dlrm; allowed for model small: ddp"),
    ("_ranges", {"optim__betas": [0.9]}, "optim.betas=[0.9] must be two numbers"),
    ("_ranges", {"optim__min_lr": -1.0}, "optim.min_lr=-1.0 must be zero or positive"),
    ("_schedule", {"optim__decay": "cosine", "optim__min_lr": 1.0}, "optim.min_lr=1.0 is above optim.lr=0.1"),
    ("_schedule", {"optim__decay": "quadratic"}, "needs optim.decay_steps"),
]


@pytest.mark.parametrize(("rule", "values", "said"), BROKEN)
def test_refused_in_one_line_by_its_rule(rule: str, values: dict[str, Any], said: str) -> None:
    config = changed(**values)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert getattr(config_rules, rule)(config) == str(refused.value)


def test_the_table_covers_every_rule() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    "values",
    [
        {},
        BASELINE,
        AUTO,
        {"comm__embedding_all_to_all": "auto"},
        {"comm__require_fused": True},
        {"optim__in_backward": False, "optim__clip_norm": 1.0, "optim__accumulate": 4},
        {"model__embedding_dtype": "fp16", "optim__name": "adagrad"},
        {"data__kind": "synthetic", "data__num_samples": 1000},
        {"trainer__resume": "auto"},
        {"trainer__device": "cuda"},
        {"trainer__device": "cuda", "optim__name": "adam"},
        {"optim__name": "adam", "optim__in_backward": False},
        {"data__batch_size": 1},
        {"optim__warmup_steps": 3, "optim__decay_start": 3, "optim__decay_steps": 1},
    ],
)
def test_what_makes_sense_passes(values: dict[str, Any]) -> None:
    check(changed(**values))


def test_criteo_passes_where_its_directory_exists(tmp_path: Path) -> None:
    check(changed(data__kind="criteo", data__path=str(tmp_path)))


def test_backends_are_those_with_a_file_for_the_operator() -> None:
    assert "host" in implemented_backends("all_to_all")
    assert "baseline" not in implemented_backends("all_to_all")
    assert implemented_backends("no_such_operator") == []


def test_nothing_is_suggested_where_nothing_is_close() -> None:
    assert did_you_mean("zzz", ["fused", "baseline"]) == ""
