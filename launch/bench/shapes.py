"""What one block of rows is about: an operator's shape, and the bytes that it makes every rank move at least.

Here are those of the exchanges of pooled rows and of plain ones; other operators' are in their files.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from launch.bench.limits import Traffic

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CRITEO = "criteo"  # as a pooling: the multi-hot mix of MLPerf's DLRM-DCNv2, its 26 features in turn
INDEX_BYTES = 8
PROBE_TABLES, PROBE_POOLING, PROBE_BATCH = 8, 70, 4096
_DCNV2 = Path(__file__).parents[2] / "configs" / "model" / "dlrm_mlperf_dcnv2.yaml"


@dataclass(frozen=True)
class Shape(ABC):
    """Its fields are keys of the rows."""

    compute = "compute"  # what the exchange is fused with, in a word

    @property
    @abstractmethod
    def dtype(self) -> str:
        """A key of TORCH_DTYPES."""

    @property
    @abstractmethod
    def output_bytes(self) -> int:
        """Of one rank's results, before they are exchanged."""

    @abstractmethod
    def traffic(self, world: int) -> Traffic:
        """What all ranks together must do in a forward."""


@dataclass(frozen=True)
class EmbeddingShape(Shape):
    compute = "lookups"

    tables_per_rank: int
    rows: int  # of a table; with pooling=criteo, of MLPerf's tables what fits below it
    dim: int
    pooling: int | str  # ids a bag, or "criteo"
    batch: int  # of all ranks
    dtype: str = "fp32"
    optimizer: str = "sgd"
    configuration: str | None = None  # its name in a list of configurations

    @property
    def bag_sizes(self) -> list[int]:
        """Ids a bag, of each of a rank's tables."""
        if self.pooling == CRITEO:
            sizes = _criteo()[0]
            return [sizes[t % len(sizes)] for t in range(self.tables_per_rank)]
        return [int(self.pooling)] * self.tables_per_rank

    @property
    def table_rows(self) -> list[int]:
        if self.pooling == CRITEO:
            rows = _criteo()[1]
            return [min(rows[t % len(rows)], self.rows) for t in range(self.tables_per_rank)]
        return [self.rows] * self.tables_per_rank

    @property
    def lookups(self) -> int:
        """Of one rank in a call."""
        return self.batch * sum(self.bag_sizes)

    @property
    def table_bytes(self) -> int:
        """Of one rank's tables."""
        return sum(self.table_rows) * self.dim * TORCH_DTYPES[self.dtype].itemsize

    @property
    def output_bytes(self) -> int:
        """What one rank's lookups give for the whole batch."""
        return self.batch * self.tables_per_rank * self.dim * TORCH_DTYPES[self.dtype].itemsize

    def traffic(self, world: int) -> Traffic:
        """Of all ranks, in a forward: each looked-up row and each id read once, each pooled row written once."""
        row_bytes = self.dim * TORCH_DTYPES[self.dtype].itemsize
        ids = (self.lookups + self.tables_per_rank * self.batch + 1) * INDEX_BYTES
        return Traffic(
            gathered=world * self.lookups * row_bytes,
            read=world * ids,
            written=world * self.output_bytes,
            sent=(world - 1) * self.output_bytes,  # each sample's rank keeps its own part
        )

    def for_gather_rate(self) -> EmbeddingShape:
        """Long bags on tables of this width and length: nearly all their bytes are looked-up rows."""
        tables = min(self.tables_per_rank, PROBE_TABLES)
        return EmbeddingShape(tables, self.rows, self.dim, PROBE_POOLING, PROBE_BATCH, self.dtype, self.optimizer)


@dataclass(frozen=True)
class AllToAllShape(Shape):
    kib: int  # sent by each rank
    dtype: str = "fp32"

    def columns(self, world: int) -> int:
        """Elements that a rank sends to each."""
        return max(1, self.kib * 1024 // world // TORCH_DTYPES[self.dtype].itemsize)

    @property
    def output_bytes(self) -> int:
        return self.kib * 1024

    def traffic(self, world: int) -> Traffic:
        per_rank = world * self.columns(world) * TORCH_DTYPES[self.dtype].itemsize
        return Traffic(copied=world * per_rank, sent=(world - 1) * per_rank)


@functools.cache
def _criteo() -> tuple[list[int], list[int]]:
    """(multi-hot sizes, rows) of the 26 features."""
    model = OmegaConf.load(_DCNV2)
    return list(model.multi_hot_sizes), list(model.table_rows)
