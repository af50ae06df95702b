"""Generated click logs, prepared once and kept, for whoever has no Criteo data."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import filelock

from trainers.data.errors import DataError
from trainers.data.generate import generate
from trainers.data.layout import NUM_SPARSE, write_json
from trainers.data.prepare import PrepareOptions, prepare

CACHE = Path("outputs/data")
VERSION = 1  # another number after any change to what the generator or the preparation writes
LOCK_TIMEOUT_S = 1800
_KEY_NAME = "generated.json"


def synthetic_directory(num_samples: int, seed: int, table_rows: list[int], path: str | None = None) -> Path:
    """The directory of prepared arrays for these options, made first if need be; ids fit tables of `table_rows` rows.

    `path` None: a cache under outputs/data, named by the options. Any number of processes may call this at once: one
    generates, the others wait.
    """
    if len(table_rows) != NUM_SPARSE:
        raise DataError(
            f"synthetic data has Criteo's {NUM_SPARSE} categorical features, the model has {len(table_rows)} tables"
        )
    key = {"version": VERSION, "samples": num_samples, "seed": seed, "table_rows": list(table_rows)}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    directory = (CACHE / f"synthetic-{digest}" if path is None else Path(path)).resolve()
    if _complete(directory, key):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(directory.with_name(f".{directory.name}.lock"), timeout=LOCK_TIMEOUT_S):
            if not _complete(directory, key):
                _make(directory, key)
    except filelock.Timeout:
        raise DataError(f"{directory}: another process has been generating it for {LOCK_TIMEOUT_S} s") from None
    return directory


def _complete(directory: Path, key: dict[str, Any]) -> bool:
    try:
        found = json.loads((directory / _KEY_NAME).read_text())
    except FileNotFoundError:
        return False
    if found != key:
        raise DataError(
            f"{directory} holds synthetic data of other options ({found}); remove it or choose another data.path"
        )
    return True


def _make(directory: Path, key: dict[str, Any]) -> None:
    if directory.exists() and any(directory.glob("day_*.np?")) and not (directory / ".prepare").exists():
        raise DataError(f"{directory} holds arrays that were not generated; choose another data.path or data=criteo")
    print(f"generating {key['samples']} synthetic samples in {directory}", file=sys.stderr, flush=True)
    directory.mkdir(exist_ok=True)
    source = directory / "clicks.tsv"
    # Id 0 is for rare and unseen values, so a table of n rows serves n - 1 values.
    generate(source, key["samples"], key["seed"], [max(rows - 1, 1) for rows in key["table_rows"]])
    # A value seen once in training teaches little and would leave id 0 untrained.
    prepare([source], directory, PrepareOptions(min_count=2, max_rows=key["table_rows"]), overwrite=True)
    source.unlink()
    write_json(directory / _KEY_NAME, key)
