"""JSON that every reader accepts: NaN and infinities become null, and the record says which they were."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NON_FINITE = "non_finite"
"""Key of the flag: `{"loss": null, "non_finite": {"loss": "nan"}}`. Nested values go by their dotted path."""


def dumps(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON, on one line unless indented. Tensors and arrays of one element become numbers, paths become strings.

    Raises TypeError for a value that has no JSON form.
    """
    flags: dict[str, str] = {}
    clean = {key: _clean(value, str(key), flags) for key, value in record.items()}
    if flags:
        clean[NON_FINITE] = flags
    return json.dumps(clean, allow_nan=False, indent=indent)


def loads(line: str) -> dict[str, Any]:
    """The inverse of `dumps`: top-level NaN and infinities come back as floats. ValueError where it is no JSON
    object.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for key, text in record.pop(NON_FINITE, {}).items():
        if key in record:
            record[key] = float(text)
    return record


def _clean(value: Any, path: str, flags: dict[str, str]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        flags[path] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(key): _clean(item, f"{path}.{key}", flags) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_clean(item, f"{path}.{index}", flags) for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # torch and numpy scalars
        return _clean(value.item(), path, flags)
    raise TypeError(f"{path} is a {type(value).__name__}, which has no JSON form")
