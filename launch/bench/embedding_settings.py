"""What a benchmark of embedding + All-to-All can be told: its shapes, one by one or as a list of configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fused_ops.embedding_optimizer import TABLE_STATES
from launch.bench import configurations
from launch.bench.settings import (
    BenchSettings,
    SettingsError,
    as_list,
    check_at_least_one,
    check_choices,
    check_counts,
)
from launch.bench.shapes import CRITEO, EmbeddingShape


@dataclass
class Settings(BenchSettings):
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

    columns: ClassVar = {"cpu": ("baseline", "unfused", "host"), "cuda": ("baseline", "unfused", "cuda", "triton")}

    def check(self) -> None:
        super().check()
        check_choices(self, "optimizer", tuple(TABLE_STATES))
        check_choices(self, "mode", ("sum", "mean"))
        for key in ("rows", "tables"):
            check_at_least_one(self, key)
        check_counts(self, "dim")
        check_counts(self, "pooling", least=0, word=CRITEO)
        check_counts(self, "batch")
        if self.device == "cpu" and "bf16" in as_list(self.dtype):
            raise SettingsError(
                "dtype=bf16: FBGEMM's CPU kernels take fp32 and fp16 tables, so there is no baseline to time"
            )
        self._check_configurations()

    def _check_configurations(self) -> None:
        if self.configs is None:
            return
        try:
            found = configurations.load(self.configs)
        except ValueError as error:
            raise SettingsError(f"configs={self.configs}: {error}") from error
        if not any(configurations.chosen(found, self.ranks, link) for link in as_list(self.link)):
            raise SettingsError(
                f"configs={self.configs} has no configuration for ranks={self.ranks} and link={self.link}"
            )

    def shapes(self, link: str = "auto") -> Iterator[EmbeddingShape]:
        if self.configs is not None:
            yield from configurations.chosen(configurations.load(self.configs), self.ranks, link)
            return
        swept = itertools.product(as_list(self.dtype), as_list(self.dim), as_list(self.pooling), as_list(self.batch))
        for dtype, dim, pooling, batch in swept:
            yield EmbeddingShape(self.tables, self.rows, dim, pooling, batch, dtype, self.optimizer)
