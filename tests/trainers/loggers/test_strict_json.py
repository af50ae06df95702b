import json
import math
from pathlib import Path

import pytest
import torch

from trainers.loggers import strict_json


def reject_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_valid_json_and_come_back(value):
    line = strict_json.dumps({"loss": value, "step": 3})
    plain = json.loads(line, parse_constant=reject_constant)
    assert plain["loss"] is None
    assert plain["non_finite"] == {"loss": str(value)}
    back = strict_json.loads(line)
    assert back["step"] == 3
    assert back["loss"] == value or (math.isnan(value) and math.isnan(back["loss"]))
    assert "non_finite" not in back


def test_nested_values_are_flagged_by_path():
    plain = json.loads(strict_json.dumps({"a": {"b": [1.0, math.inf]}}), parse_constant=reject_constant)
    assert plain == {"a": {"b": [1.0, None]}, "non_finite": {"a.b.1": "inf"}}


def test_scalars_of_torch_and_paths():
    line = strict_json.dumps({"loss": torch.tensor(0.5), "count": torch.tensor(3), "dir": Path("a/b")})
    assert json.loads(line) == {"loss": 0.5, "count": 3, "dir": "a/b"}


def test_a_value_without_json_form_is_named():
    with pytest.raises(TypeError, match=r"model\.fn is a function"):
        strict_json.dumps({"model": {"fn": reject_constant}})


def test_only_objects_are_records():
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        strict_json.loads("[1]")
