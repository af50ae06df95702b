"""What a DLRM's rules refuse, in one line that says what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.test_config_rules import changed
from trainers.config import ConfigError
from trainers.config_rules import check
from trainers.dlrm import rules

BROKEN = [
    ("_tables", {"model__table_rows": []}, "model.table_rows must list"),
    ("_tables", {"model__table_rows": [5, 0]}, "model.table_rows must list"),
    ("_tables", {"model__multi_hot_sizes": [1, 2]}, "model.multi_hot_sizes has 2 entries and model.table_rows 26"),
    ("_tables", {"model__multi_hot_sizes": [0] * 26}, "at least 1 everywhere"),
    ("_layers", {"model__bottom_mlp": [16, 4]}, "model.bottom_mlp ends in 4 and model.embedding_dim is 8"),
    ("_layers", {"model__bottom_mlp": []}, "model.bottom_mlp=[]"),
    ("_layers", {"model__top_mlp": [16, 2]}, "it must end in 1"),
    ("_layers", {"model__top_mlp": [1]}, "needs a hidden width"),
    ("_data", {"data__kind": "criteo"}, "data=criteo needs data.path"),
    ("_data", {"data__kind": "criteo", "data__path": "/no/such/place"}, "data.path=/no/such/place is not a directory"),
    ("_data", {"data__path": "/tmp"}, "means nothing with data=random"),
    ("_data", {"data__num_samples": 10}, "is for data=synthetic only"),
    ("_data", {"data__kind": "synthetic"}, "data.num_samples is needed"),
    (
        "_data",
        {"data__kind": "synthetic", "data__num_samples": 9, "model__multi_hot_sizes": [2] * 26},
        "one id a feature",
    ),
    ("_data", {"data__kind": "synthetic", "data__num_samples": 9, "model__num_dense": 4}, "takes 4 and 26"),
    ("_plain_gradients", {"optim__clip_norm": 1.0}, "optim.clip_norm=1.0 needs the tables' gradients"),
    ("_plain_gradients", {"optim__accumulate": 2}, "set optim.in_backward=false"),
    ("_adam", {"optim__name": "adam"}, "needs a GPU, as FBGEMM has no Adam on the CPU"),
    ("_optimizer", {"optim__name": "adamw"}, "optim.name=adamw does not train tables (allowed for a DLRM: sgd,"),
    ("_optimizer", {"optim__weight_decay": 0.1}, "optim.weight_decay=0.1 is adamw's, and optim.name is sgd"),
    ("_optimizer", {"engine__tensor_parallel": 2}, "are for a Transformer"),
]


@pytest.mark.parametrize(("rule", "values", "said"), BROKEN)
def test_refused_in_one_line_by_its_rule(rule: str, values: dict[str, Any], said: str) -> None:
    config = changed(**values)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert getattr(rules, rule)(config) == str(refused.value)


def test_the_table_covers_every_rule() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.__name__ for rule in rules.RULES}
