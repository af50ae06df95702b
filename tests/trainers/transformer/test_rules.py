"""What a Transformer's rules refuse, in one line that says what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.transformer import small
from trainers.config import ConfigError
from trainers.config_rules import check
from trainers.transformer import rules

BROKEN = [
    ("_architecture", {"model": {"width": 30}}, "model small: width 30 does not divide by 4 heads; give head_dim"),
    ("_architecture", {"model": {"kv_heads": 3}}, "model small: 4 heads do not divide over 3 KV heads"),
    ("_data", {"data": {"length": 25}}, "data.length=25, and model small has model.max_length=24 learned positions"),
    ("_data", {"data": {"path": "/no/such/place"}}, "data.path=/no/such/place is neither a directory made by"),
    ("_data", {"data": {"tokenizer_vocabulary": 300}}, "data.tokenizer_vocabulary=300 is for data.tokenizer=bpe"),
    ("_weights", {"model": {"weights": "/no/such/place"}}, "model.weights=/no/such/place has no config.json"),
    ("_optimizer", {"optim": {"name": "adagrad", "weight_decay": 0.0}}, "(allowed: sgd, adam, adamw)"),
    ("_optimizer", {"optim": {"name": "adam"}}, "optim.weight_decay=0.1 is adamw's, and optim.name is adam"),
    ("_optimizer", {"optim": {"dense_lr": 0.1}}, "optim.dense_lr=0.1 is for a DLRM"),
    ("_engine", {"engine": {"zero_stage": 3}}, "engine.zero_stage=3 is not a choice (allowed: 1, 2)"),
    ("_engine", {"engine": {"tensor_parallel": 8}}, "engine.tensor_parallel=8: model small has 4 KV heads to split"),
]


@pytest.mark.parametrize(("rule", "values", "said"), BROKEN)
def test_refused_in_one_line_by_its_rule(rule: str, values: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = small.config(tmp_path, tmp_path, **values)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert getattr(rules, rule)(config) == str(refused.value)


def test_the_table_covers_every_rule() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rule in rules.RULES}


def test_megatron_files_need_their_end_of_document(tmp_path: Path) -> None:
    (tmp_path / "tokens.idx").touch()
    config = small.config(tmp_path, tmp_path / "tokens")
    with pytest.raises(ConfigError, match=r"do not say how documents end: set data.end_of_document"):
        check(config)
    config.data.end_of_document = 0  # type: ignore[attr-defined]
    check(config)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"data": {"path": None}},
        {"engine": {"kind": "deepspeed", "zero_stage": 2, "sequence_parallel": True}},
        {"model": {"positions": "rope"}, "data": {"length": 100}},
        {"optim": {"name": "sgd", "weight_decay": 0.0, "accumulate": 3}},
    ],
)
def test_what_makes_sense_passes(values: dict[str, Any], tmp_path: Path) -> None:
    check(small.config(tmp_path, tmp_path, **values))
