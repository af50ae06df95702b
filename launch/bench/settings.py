"""What a benchmark run can be told, typed: `key=value` words on the command line."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fused_ops.embedding_optimizer import TABLE_STATES
from launch.bench import configurations
from launch.bench.shapes import CRITEO, TORCH_DTYPES, AllToAllShape, EmbeddingShape, Shape

OPERATORS = ("all_to_all", "embedding_all_to_all")
OPTIMIZERS = tuple(TABLE_STATES)
POOLINGS = ("sum", "mean")
LINKS = ("auto", "peer", "pinned")
BACKENDS = {"cpu": ("baseline", "unfused", "host"), "cuda": ("baseline", "unfused", "cuda", "triton")}
EXCHANGE_ONLY = ("unfused",)  # columns of embedding_all_to_all that all_to_all has no counterpart of


@dataclass
class BenchSettings:
    """Fields of lists are swept: one row block a combination."""

    op: str = "embedding_all_to_all"
    ranks: int = 2
    device: str = "cpu"  # cpu | cuda
    out: str | None = None  # JSON rows; appended to nothing, written anew
    backends: Any = None  # columns; None = all of the device's
    dtype: Any = "fp32"
    rounds: int = 5  # every round times each variant once, interleaved
    iterations: int = 12  # timed calls a round
    warmup: int = 3
    rotate: int = 4  # distinct inputs, so that a cache does not answer; on cuda the least, small shapes take more
    seed: int = 0
    timeout_s: float = 300.0  # bound on every wait of one rank for another, and on one shape's time
    threads: int = 1  # CPU threads a rank
    # cuda
    ranks_per_gpu: int = 1  # ranks that share a card, in a one-GPU lab that this program sets up
    mps: str = "on"  # on | off: ranks that share a card take turns, and no timing means anything
    link: Any = "auto"  # auto | peer | pinned: how ranks reach each other
    graph: bool = True  # time replays of CUDA graphs
    nccl: str | None = None  # a libnccl.so.2 to put in front of torch's
    nccl_max_ctas: Any = None  # CTAs of the communicators tried for baseline; default 4, 8, 16, 32, as far as they fit
    budget_s: float = 2.0  # of timed calls a shape, after which variants get fewer rounds (never below 3)
    # embedding_all_to_all
    configs: str | None = (
        None  # a list of configurations, by its name in launch/bench/lists or its path; names all shapes
    )
    tables: int = 8  # a rank
    rows: int = 100_000
    dim: Any = 64
    pooling: Any = 20  # ids a bag, or "criteo": the multi-hot mix of MLPerf's DLRM-DCNv2
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
    choices = {
        "op": OPERATORS,
        "device": tuple(BACKENDS),
        "optimizer": OPTIMIZERS,
        "mode": POOLINGS,
        "mps": ("on", "off"),
    }
    for key, allowed in choices.items():
        if getattr(s, key) not in allowed:
            raise SettingsError(f"{key} must be one of {', '.join(allowed)}, got '{getattr(s, key)}'")
    lists = {"dtype": tuple(TORCH_DTYPES), "link": LINKS, "backends": BACKENDS[s.device]}
    for key, allowed in lists.items():
        for value in as_list(getattr(s, key)):
            if value not in allowed:
                raise SettingsError(f"{key} must be one of {', '.join(allowed)}, or a list of them, got '{value}'")
    for key in ("ranks", "threads", "rounds", "iterations", "rotate", "rows", "tables", "ranks_per_gpu"):
        if getattr(s, key) < 1:
            raise SettingsError(f"{key} must be at least 1, got {getattr(s, key)}")
    for key in ("timeout_s", "budget_s"):
        if not getattr(s, key) > 0:
            raise SettingsError(f"{key} must be positive seconds, got {getattr(s, key)}")
    for key, least, word in (
        ("dim", 1, None),
        ("pooling", 0, CRITEO),
        ("batch", 1, None),
        ("kib", 1, None),
        ("nccl_max_ctas", 1, None),
    ):
        for value in as_list(getattr(s, key)):
            if (not isinstance(value, int) or value < least) and (word is None or value != word):
                also = f", '{word}'" if word else ""
                raise SettingsError(
                    f"{key} must be a whole number from {least} up{also}, or a list of them, got '{value}'"
                )
    _check_device(s)
    _check_configurations(s)


def _check_device(s: BenchSettings) -> None:
    if s.device == "cpu":
        for key, default in (
            ("ranks_per_gpu", 1),
            ("mps", "on"),
            ("link", "auto"),
            ("nccl", None),
            ("nccl_max_ctas", None),
        ):
            if getattr(s, key) != default:
                raise SettingsError(f"{key}={getattr(s, key)} is for device=cuda; this is device=cpu")
        if s.op == "embedding_all_to_all" and "bf16" in as_list(s.dtype):
            raise SettingsError(
                "dtype=bf16: FBGEMM's CPU kernels take fp32 and fp16 tables, so there is no baseline to time"
            )
        return
    for name in ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS"):
        if name in os.environ:
            raise SettingsError(f"unset {name}: it overrides nccl_max_ctas, of which the best is searched")
    cards = torch.cuda.device_count()
    if s.ranks > cards * s.ranks_per_gpu:
        raise SettingsError(
            f"ranks={s.ranks} with ranks_per_gpu={s.ranks_per_gpu} need {-(-s.ranks // s.ranks_per_gpu)} GPUs, torch sees {cards}"
        )
    if s.ranks % s.ranks_per_gpu:
        raise SettingsError(f"ranks={s.ranks} do not fill cards of ranks_per_gpu={s.ranks_per_gpu}")


def _check_configurations(s: BenchSettings) -> None:
    if s.configs is None:
        return
    if s.op != "embedding_all_to_all":
        raise SettingsError(f"configs={s.configs} are shapes of embedding_all_to_all, and op={s.op}")
    try:
        found = configurations.load(s.configs)
    except ValueError as error:
        raise SettingsError(f"configs={s.configs}: {error}") from error
    if not any(configurations.chosen(found, s.ranks, link) for link in as_list(s.link)):
        raise SettingsError(f"configs={s.configs} has no configuration for ranks={s.ranks} and link={s.link}")


def as_list(value: Any) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def backends(s: BenchSettings) -> list[str]:
    """The columns of a run."""
    return [
        b for b in as_list(s.backends) or BACKENDS[s.device] if s.op == "embedding_all_to_all" or b not in EXCHANGE_ONLY
    ]


def shapes(s: BenchSettings, link: str = "auto") -> Iterator[Shape]:
    """The shapes of a run over that link, in the order of the rows."""
    if s.configs is not None:
        yield from configurations.chosen(configurations.load(s.configs), s.ranks, link)
    elif s.op == "all_to_all":
        for dtype, kib in itertools.product(as_list(s.dtype), as_list(s.kib) or [16, 1024, 16384]):
            yield AllToAllShape(kib, dtype)
    else:
        swept = itertools.product(as_list(s.dtype), as_list(s.dim), as_list(s.pooling), as_list(s.batch))
        for dtype, dim, pooling, batch in swept:
            yield EmbeddingShape(s.tables, s.rows, dim, pooling, batch, dtype, s.optimizer)
