"""What a benchmark run can be told, typed: `key=value` words on the command line.

The keys here are every operator's. Those that make its shapes are its own: its file has a subclass of BenchSettings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.bench import operators
from launch.bench.shapes import TORCH_DTYPES, Shape

DEVICES = ("cpu", "cuda")
LINKS = ("auto", "peer", "pinned")


class SettingsError(ValueError):
    """One line for the user."""


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
    rotate: int = 4  # least distinct inputs; small shapes take more, so that a cache does not answer
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

    columns: ClassVar[Mapping[str, Sequence[str]]] = {}  # backends of each device

    def shapes(self, link: str = "auto") -> Iterator[Shape]:
        """The shapes to measure over that link, in the order of the rows."""
        raise NotImplementedError

    def check(self) -> None:
        """SettingsError for what is wrong."""
        check_choices(self, "device", DEVICES)
        check_choices(self, "mps", ("on", "off"))
        check_choices(self, "dtype", tuple(TORCH_DTYPES), listed=True)
        check_choices(self, "link", LINKS, listed=True)
        check_choices(self, "backends", self.columns[self.device], listed=True)
        for key in ("ranks", "threads", "rounds", "iterations", "rotate", "ranks_per_gpu"):
            check_at_least_one(self, key)
        for key in ("timeout_s", "budget_s"):
            if not getattr(self, key) > 0:
                raise SettingsError(f"{key} must be positive seconds, got {getattr(self, key)}")
        check_counts(self, "nccl_max_ctas")
        _check_device(self)


def parse(words: list[str]) -> BenchSettings:
    """The settings of the operator that `words` name, checked."""
    pairs = [_pair(word) for word in words]
    op = next((value for key, value in reversed(pairs) if key == "op"), BenchSettings.op)
    if op not in operators.OPERATORS:
        raise SettingsError(f"op must be one of {', '.join(operators.OPERATORS)}, got '{op}'")
    chosen = operators.load(op).Settings
    for key, value in pairs:
        _check_key(op, chosen, key, value)
    try:
        settings: BenchSettings = OmegaConf.to_object(  # type: ignore[assignment]
            OmegaConf.merge(OmegaConf.structured(chosen), OmegaConf.from_dotlist(words))
        )
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise SettingsError(f"{key}{str(error).splitlines()[0]}") from error
    settings.check()
    return settings


def keys_of(settings: type[BenchSettings]) -> list[str]:
    return [field.name for field in fields(settings)]


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise SettingsError(f"expected key=value, got '{word}'")
    return key, value


def _check_key(op: str, chosen: type[BenchSettings], key: str, value: str) -> None:
    known = keys_of(chosen)
    if key in known:
        return
    owners = [other for other in operators.OPERATORS if key in keys_of(operators.load(other).Settings)]
    if owners:
        raise SettingsError(f"{key}={value}: these are shapes of {', '.join(owners)}, and op={op}")
    near = difflib.get_close_matches(key, known, 1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise SettingsError(f"unknown key '{key}'{hint}; keys of {op}: {', '.join(sorted(known))}")


def check_choices(settings: BenchSettings, key: str, allowed: Sequence[str], listed: bool = False) -> None:
    """`listed`: the value may be a list of allowed ones."""
    value = getattr(settings, key)
    for one in as_list(value) if listed else [value]:
        if one not in allowed:
            also = ", or a list of them" if listed else ""
            raise SettingsError(f"{key} must be one of {', '.join(allowed)}{also}, got '{one}'")


def check_at_least_one(settings: BenchSettings, key: str) -> None:
    if getattr(settings, key) < 1:
        raise SettingsError(f"{key} must be at least 1, got {getattr(settings, key)}")


def check_counts(settings: BenchSettings, key: str, least: int = 1, word: str | None = None) -> None:
    """A whole number or a list of them; `word` is allowed too."""
    for value in as_list(getattr(settings, key)):
        if (not isinstance(value, int) or value < least) and (word is None or value != word):
            also = f", '{word}'" if word else ""
            raise SettingsError(f"{key} must be a whole number from {least} up{also}, or a list of them, got '{value}'")


def _check_device(s: BenchSettings) -> None:
    if s.device == "cpu":
        for key in ("ranks_per_gpu", "mps", "link", "nccl", "nccl_max_ctas"):
            if getattr(s, key) != getattr(BenchSettings, key):
                raise SettingsError(f"{key}={getattr(s, key)} is for device=cuda; this is device=cpu")
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


def as_list(value: Any) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def backends(s: BenchSettings) -> list[str]:
    """The columns of a run."""
    return as_list(s.backends) or list(s.columns[s.device])


def shapes(s: BenchSettings, link: str = "auto") -> Iterator[Shape]:
    """The shapes of a run over that link, in the order of the rows."""
    return s.shapes(link)
