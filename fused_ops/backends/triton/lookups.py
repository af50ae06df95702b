"""This rank's lookups in the kernels' form: contiguous tensors, what is known of each feature, and the sorted order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable

import torch
import triton.language as tl
from torch import Tensor

from fused_ops.backends.triton.features import FEATURE_WORDS, Feature
from fused_ops.embedding_columns import merged_runs
from fused_ops.embedding_inputs import OPERATOR, POLICIES, EmbeddingInputs
from fused_ops.symmetric.triton_channel import TritonChannel
from fused_ops.symmetric.triton_layout import DECREASING, FIRST_OFFSET, LAST_OFFSET

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SORT_BITS = 63
WIDEST_ROW = 1 << 13


class Lookups:
    """Checked inputs. Raises ValueError for shapes and types; the values are the check kernel's business."""

    def __init__(self, inputs: EmbeddingInputs, lane: TritonChannel) -> None:
        inputs.check()
        self.inputs, self.lane = inputs, lane
        self.batch = inputs.layout.global_batch
        self.indices = inputs.indices.contiguous()
        self.offsets = inputs.offsets.to(torch.int64).contiguous()
        self.is_weighted = inputs.weights is not None
        # A kernel that reads no weights takes any tensor in their place.
        self.weights = self.offsets if inputs.weights is None else inputs.weights.contiguous()
        self.widest = max((dim for rank in inputs.layout.feature_dims for dim in rank), default=1)
        self.policy = POLICIES.index(inputs.out_of_range)
        self.dtype = DTYPES[inputs.dtype]
        self.mean = inputs.pooling == "mean"
        if self.widest > WIDEST_ROW:
            raise ValueError(f"{OPERATOR}: the triton backend takes tables up to {WIDEST_ROW} wide, got {self.widest}")
        if self.total_rows.bit_length() + self.payload_bits > SORT_BITS:
            raise ValueError(
                f"{OPERATOR}: {self.indices.numel()} lookups in tables of {self.total_rows} rows together are more than the "
                "kernels can sort"
            )

    @functools.cached_property
    def first_rows(self) -> list[int]:
        """Each table's first row, counted over all tables."""
        return list(itertools.accumulate((table.shape[0] for table in self.inputs.tables), initial=0))

    @property
    def total_rows(self) -> int:
        return self.first_rows[-1]

    @property
    def payload_bits(self) -> int:
        """Bits below the row in a sorted lookup: its position where it has a weight of its own, else its bag."""
        return max(1, (self.indices.numel() if self.is_weighted else len(self.inputs.dims) * self.batch).bit_length())

    @functools.cached_property
    def features(self) -> Tensor:
        """[features, FEATURE_WORDS], of at least one row."""
        inputs, words = self.inputs, []
        local_columns = itertools.accumulate(inputs.dims, initial=0)
        for t, dim, column, local in zip(
            inputs.feature_tables, inputs.dims, inputs.columns, local_columns, strict=False
        ):
            table = inputs.tables[t]
            row = [0] * FEATURE_WORDS
            row[Feature.TABLE], row[Feature.ROWS], row[Feature.DIM] = table.data_ptr(), table.shape[0], dim
            row[Feature.COLUMN], row[Feature.LOCAL_COLUMN], row[Feature.FIRST_ROW] = column, local, self.first_rows[t]
            words += row
        return self.lane.constants(words or [0] * FEATURE_WORDS)

    @functools.cached_property
    def alignment(self) -> int:
        """Elements, up to 16 bytes: a power of two that divides every width and column of the layout."""
        layout = self.inputs.layout
        _, columns, widths = merged_runs(layout)
        dims = [dim for rank in layout.feature_dims for dim in rank]
        return math.gcd(16 // self.inputs.dtype.itemsize, layout.total_dim, *columns, *widths, *dims)

    @functools.cached_property
    def bag_of_lookup(self) -> Tensor:
        """[nnz] int64. Some bag of this rank's whatever the offsets are."""
        positions = torch.arange(self.indices.numel(), device=self.indices.device)
        bags = torch.searchsorted(self.offsets[1:].contiguous(), positions, right=True)
        return bags.clamp_(max=max(self.offsets.numel() - 2, 0))

    def sorted_order(self) -> Tensor:
        """[nnz] int64 {row over all tables, payload}, ascending. Lookups of one row keep their order."""
        if self.indices.numel() == 0:
            return torch.empty(0, dtype=torch.int64, device=self.indices.device)
        bags = self.bag_of_lookup
        features = self.features.view(-1, FEATURE_WORDS)[bags // self.batch]
        rows, first_rows = features[:, Feature.ROWS], features[:, Feature.FIRST_ROW]
        index = self.indices.to(torch.int64)
        if self.inputs.out_of_range == "clamp":
            index = torch.minimum(index.clamp(min=0), rows - 1)
        elif self.inputs.out_of_range == "hash":
            index = index.remainder(rows.clamp(min=1))
        payload = torch.arange(index.numel(), device=index.device) if self.is_weighted else bags
        return (((first_rows + index) << self.payload_bits) | payload).sort().values

    def describe_problem(self) -> functools.partial[str]:
        """Says what is wrong with an offset or index; keeps the tables' shapes, not the lookups."""
        empty = self.offsets.new_empty(0)
        light = dataclasses.replace(self.inputs, indices=empty, offsets=empty, weights=None)
        return functools.partial(_describe_problem, light, self.indices.numel())


def byte_alignment(tensors: Iterable[Tensor | None]) -> int:
    """Up to 16: a power of two that divides the addresses of them all."""
    return math.gcd(16, *(t.data_ptr() for t in tensors if t is not None))


def _describe_problem(inputs: EmbeddingInputs, num_indices: int, kind: int, at: int, value: int, feature: int) -> str:
    if kind == FIRST_OFFSET:
        return f"offsets must start with 0, got {value}"
    if kind == LAST_OFFSET:
        return f"offsets must end with the number of indices, {num_indices}, got {value}"
    if kind == DECREASING:
        return f"offsets must not decrease: offsets[{at}] = {value} is below offsets[{at - 1}] (feature {feature})"
    return inputs.describe_index(feature, at, value).removeprefix(f"{OPERATOR}: ")
