"""Lists of named shapes of embedding + All-to-All: `lists/<name>.yaml`, or a file of that form.

Each entry names a shape, and the ranks and links it is measured with; what an entry leaves out comes from `defaults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from launch.bench.shapes import CRITEO, TORCH_DTYPES, EmbeddingShape

FOLDER = Path(__file__).parent / "lists"
MOST_RUNS = 60  # of a list: a shape on a number of ranks over a link
MOST_BYTES = 100e9  # of all ranks' tables
LINKS = ("peer", "pinned")


@dataclass(frozen=True)
class Configuration:
    shape: EmbeddingShape
    ranks: tuple[int, ...]
    links: tuple[str, ...]  # peer | pinned

    def runs(self) -> Iterator[tuple[int, str]]:
        for ranks in self.ranks:
            for link in self.links:
                yield ranks, link


def load(name: str) -> list[Configuration]:
    """The list of that name or path. ValueError, one line, for what is wrong with it."""
    path = Path(name) if Path(name).suffix else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise ValueError(f"there is no {path}; lists in launch/bench/lists: {known}")
    try:
        text = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(text, dict) or not isinstance(text.get("configurations"), dict):
        raise ValueError("expected `defaults` and `configurations`, a mapping of names to shapes")
    found = [_read(key, {**text.get("defaults", {}), **(entry or {})}) for key, entry in text["configurations"].items()]
    runs = sum(len(list(configuration.runs())) for configuration in found)
    if runs > MOST_RUNS:
        raise ValueError(f"{runs} runs (shapes x ranks x links); at most {MOST_RUNS} are read by anybody")
    return found


def chosen(configurations: Iterable[Configuration], ranks: int, link: str) -> list[EmbeddingShape]:
    """The shapes to measure on so many ranks over that link ("auto": whatever links they name)."""
    return [c.shape for c in configurations if ranks in c.ranks and (link == "auto" or link in c.links)]


def _read(name: str, entry: dict[str, Any]) -> Configuration:
    keys = [field.name for field in fields(EmbeddingShape) if field.name != "configuration"]
    wanted = {*keys, "ranks", "links"}
    if entry.keys() != wanted:
        missing, unknown = wanted - entry.keys(), entry.keys() - wanted
        raise ValueError(f"{name}: " + (f"{sorted(missing)} missing" if missing else f"{sorted(unknown)} unknown"))
    configuration = Configuration(
        EmbeddingShape(**{key: entry[key] for key in keys}, configuration=name),
        tuple(entry["ranks"]),
        tuple(entry["links"]),
    )
    _check(name, configuration)
    return configuration


def _check(name: str, configuration: Configuration) -> None:
    shape = configuration.shape
    for key in ("tables_per_rank", "rows", "dim", "batch"):
        value = getattr(shape, key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {key} must be a whole number from 1 up, got '{value}'")
    if shape.pooling != CRITEO and (not isinstance(shape.pooling, int) or shape.pooling < 0):
        raise ValueError(f"{name}: pooling must be a whole number from 0 up or '{CRITEO}', got '{shape.pooling}'")
    if shape.dtype not in TORCH_DTYPES:
        raise ValueError(f"{name}: dtype must be one of {', '.join(TORCH_DTYPES)}, got '{shape.dtype}'")
    if not configuration.ranks or not configuration.links or not set(configuration.links) <= set(LINKS):
        raise ValueError(f"{name}: needs ranks, and links out of {', '.join(LINKS)}")
    in_all = max(configuration.ranks) * shape.table_bytes
    if in_all > MOST_BYTES:
        raise ValueError(f"{name}: {in_all / 1e9:.0f} GB of tables in all; at most {MOST_BYTES / 1e9:.0f} fit one card")
