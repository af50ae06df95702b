"""The on-disk layout shared by who writes prepared data and who reads it: file names, `meta.json`, and the splits.

day_<i>_dense.npy             float32 [n, 13]   log(max(x, -2) + 3), missing x = 0
day_<i>_sparse.npy            int32   [n, 26]   ids
day_<i>_labels.npy            int32   [n, 1]    0 or 1
day_<i>_sparse_multi_hot.npz  arrays "0" .. "25", int [n, hot_i]; MLPerf's, read but never written here
meta.json                     what the arrays hold; written last, so its presence means "complete"
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from trainers.data.errors import DataError

NUM_DENSE = 13
NUM_SPARSE = 26
CAT_KEYS = tuple(f"cat_{i}" for i in range(NUM_SPARSE))
SPLITS = ("train", "val", "test")
META_NAME = "meta.json"
FORMAT = "criteo-npy-1"


class Range(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one day."""

    day: int
    start: int
    stop: int


@dataclass
class Meta:
    """What a prepared directory holds; the content of `meta.json`."""

    samples: list[int]  # a day
    splits: dict[str, list[Range]]
    table_rows: list[int]  # ids of feature i are 0 .. table_rows[i] - 1
    max_ids: list[int]  # the largest id that occurs in any day
    positives: int
    sources: list[dict[str, Any]]  # file name, bytes and mtime_ns, one a day
    options: dict[str, Any]
    bad_lines: dict[str, Any]  # {"count": n, "examples": [message, ...]}
    synthetic: bool = False
    bayes_auc: float | None = None  # known for generated data only
    versions: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT


def array_path(directory: Path, day: int, kind: str) -> Path:
    """Path of a day's array; `kind` is dense, sparse, labels or sparse_multi_hot."""
    return directory / f"day_{day}_{kind}.{'npz' if kind == 'sparse_multi_hot' else 'npy'}"


def days_in(directory: Path) -> list[int]:
    """The days a directory has labels for, ascending. They must be 0, 1, 2, ... without a gap."""
    found = sorted(int(m[1]) for p in directory.iterdir() if (m := re.fullmatch(r"day_(\d+)_labels\.npy", p.name)))
    if found != list(range(len(found))):
        missing = sorted(set(range(found[-1])) - set(found))
        raise DataError(
            f"{directory}: days {missing} are missing (found {found}); days are numbered from 0 without gaps"
        )
    return found


def split_ranges(samples: list[int], fractions: tuple[Fraction, ...] | None = None) -> dict[str, list[Range]]:
    """Cut days of `samples` rows, in order, into train, val and test.

    Without `fractions`, several days give their last to val (first half) and test (second half), as for Criteo
    Terabyte; a single day holds out its last seventh in the same way, as the Kaggle week does. With `fractions` (train,
    val, test), rows of all days in order are cut at those shares.
    """
    total = sum(samples)
    if fractions is not None:
        train, val = (int(total * sum(fractions[: i + 1])) for i in range(2))
    else:
        held_out = samples[-1] if len(samples) > 1 else total // 7
        train = total - held_out
        val = train + held_out // 2
    bounds = {"train": (0, train), "val": (train, val), "test": (val, total)}
    result: dict[str, list[Range]] = {split: [] for split in SPLITS}
    first = 0
    for day, count in enumerate(samples):
        for split, (lo, hi) in bounds.items():
            start, stop = max(lo - first, 0), min(hi - first, count)
            if start < stop:
                result[split].append(Range(day, start, stop))
        first += count
    return result


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_meta(directory: Path, meta: Meta) -> None:
    write_json(directory / META_NAME, asdict(meta))


def read_meta(directory: Path) -> Meta | None:
    """The directory's `meta.json`; None where there is none (arrays prepared by other tools)."""
    path = directory / META_NAME
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None
    if raw.get("format") != FORMAT:
        raise DataError(f"{path}: format {raw.get('format')!r}, this version reads {FORMAT!r}; prepare the data again")
    raw["splits"] = {split: [Range(*r) for r in ranges] for split, ranges in raw["splits"].items()}
    return Meta(**raw)
