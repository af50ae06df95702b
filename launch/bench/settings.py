"""What a benchmark run can be told, typed: `key=value` words on the command line."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

OPERATORS = ("all_to_all", "embedding_all_to_all")
DTYPES = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
POOLINGS = ("sum", "mean")


@dataclass
class BenchSettings:
    """Fields of lists are swept: one row block a combination."""

    op: str = "embedding_all_to_all"
    ranks: int = 2
    device: str = "cpu"
    out: str | None = None  # JSON rows; appended to nothing, written anew
    dtype: str = "fp32"
    threads: int = 1  # CPU threads a rank
    rounds: int = 5  # every round times each variant once, interleaved
    iterations: int = 12  # timed calls a round
    warmup: int = 3
    rotate: int = 4  # distinct inputs, so that a cache does not answer
    seed: int = 0
    # embedding_all_to_all
    tables: int = 8  # a rank
    rows: int = 100_000
    dim: Any = 64
    pooling: Any = 20  # ids a bag
    batch: Any = 2048  # global
    mode: str = "sum"
    optimizer: str = "sgd"  # the one that FBGEMM is fastest at on CPUs
    # all_to_all
    kib: Any = None  # sent by each rank, in KiB; default 16, 1024, 16384


class SettingsError(ValueError):
    """One line for the user."""


def parse(words: list[str]) -> BenchSettings:
    known = {f.name for f in fields(BenchSettings)}
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise SettingsError(f"expected key=value, got '{word}'")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise SettingsError(f"unknown key '{key}'{hint}; keys: {', '.join(sorted(known))}")
    try:
        settings: BenchSettings = OmegaConf.to_object(  # type: ignore[assignment]
            OmegaConf.merge(OmegaConf.structured(BenchSettings), OmegaConf.from_dotlist(words))
        )
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise SettingsError(f"{key}{str(error).splitlines()[0]}") from error
    _check(settings)
    return settings


def _check(s: BenchSettings) -> None:
    choices = {"op": OPERATORS, "dtype": DTYPES, "optimizer": OPTIMIZERS, "mode": POOLINGS, "device": ("cpu",)}
    for key, allowed in choices.items():
        if getattr(s, key) not in allowed:
            raise SettingsError(f"{key} must be one of {', '.join(allowed)}, got '{getattr(s, key)}'")
    if s.op == "embedding_all_to_all" and s.dtype == "bf16":
        raise SettingsError(
            "dtype=bf16: FBGEMM's CPU kernels take fp32 and fp16 tables, so there is no baseline to time"
        )
    for key in ("ranks", "threads", "rounds", "iterations", "rotate", "rows"):
        if getattr(s, key) < 1:
            raise SettingsError(f"{key} must be at least 1, got {getattr(s, key)}")
    for key, least in (("dim", 1), ("pooling", 0), ("batch", 1), ("kib", 1)):
        for value in as_list(getattr(s, key)):
            if not isinstance(value, int) or value < least:
                raise SettingsError(f"{key} must be a whole number from {least} up, or a list of them, got '{value}'")


def as_list(value: Any) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def shapes(s: BenchSettings) -> Iterator[dict[str, int]]:
    """The shapes of a run, one dict of row fields each."""
    if s.op == "all_to_all":
        for kib in as_list(s.kib) or [16, 1024, 16384]:
            yield {"kib": kib}
        return
    for dim, pooling, batch in itertools.product(as_list(s.dim), as_list(s.pooling), as_list(s.batch)):
        yield {"tables_per_rank": s.tables, "rows": s.rows, "dim": dim, "pooling": pooling, "batch": batch}
