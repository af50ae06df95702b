"""What FBGEMM's device kernels ask about tables, features and states, on the device and made once per placement."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.backends.baseline.address_range import address_range
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs

MOST_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Features:
    """F local features of the global batch B; features of one table share its rows in the linear index space."""

    dim_offsets: Tensor  # [F + 1] int32
    hash_size_cumsum: Tensor  # [F + 1] int64: first linear index of the feature's table, then their number
    rows: Tensor  # [F] int64
    placements: Tensor  # [F] int32: 0, the device
    ones: Tensor  # [F] int32
    total_dim: int
    widest: int
    mixed_dims: bool
    linear_bits: int
    index_dtype: torch.dtype
    batch_bits: int
    batch_mask: int


@dataclass(frozen=True)
class Placed:
    """Tensors of the tables (or their states), and where each feature's starts."""

    flat: Tensor
    offsets: Tensor  # [F] int64, in elements


def features(inputs: EmbeddingInputs) -> Features:
    """B and F are at least 1."""
    narrow = inputs.indices.dtype == inputs.offsets.dtype == torch.int32
    tables = tuple(inputs.feature_tables)
    rows = tuple(inputs.tables[t].shape[0] for t in tables)
    return _features(inputs.indices.device, tables, rows, inputs.dims, inputs.layout.global_batch, narrow)


@functools.lru_cache(maxsize=256)
def _features(
    device: torch.device,
    tables: tuple[int, ...],
    rows: tuple[int, ...],
    dims: tuple[int, ...],
    batch: int,
    narrow: bool,
) -> Features:
    first, total = {}, 0
    for t, r in zip(tables, rows, strict=True):
        if t not in first:
            first[t] = total
            total += r
    bits, mask = torch.ops.fbgemm.get_infos_metadata(torch.empty(0), batch, len(tables))
    return Features(
        dim_offsets=on_device([0, *itertools.accumulate(dims)], torch.int32, device),
        hash_size_cumsum=on_device([*(first[t] for t in tables), total], torch.int64, device),
        rows=on_device(rows, torch.int64, device),
        placements=on_device([0] * len(tables), torch.int32, device),
        ones=on_device([1] * len(tables), torch.int32, device),
        total_dim=sum(dims),
        widest=max(dims),
        mixed_dims=len(set(dims)) > 1,
        linear_bits=total.bit_length(),
        index_dtype=torch.int32 if narrow and total <= MOST_INT32_ROWS else torch.int64,
        batch_bits=bits,
        batch_mask=mask,
    )


def placed(tensors: Sequence[Tensor], feature_tables: Sequence[int]) -> Placed:
    """`tensors`, one a table, for the features that look them up."""
    used = [tensors[t] for t in feature_tables]
    flat, starts = address_range(used)
    return Placed(flat, _starts(used[0].device, tuple(starts)))


@functools.lru_cache(maxsize=256)
def _starts(device: torch.device, starts: tuple[int, ...]) -> Tensor:
    return on_device(starts, torch.int64, device)


@functools.lru_cache(maxsize=64)
def nothing(device: torch.device, dtype: torch.dtype, dim: int = 1) -> Tensor:
    """An empty tensor, for what FBGEMM would cache or keep elsewhere."""
    return torch.empty([0] * dim, dtype=dtype, device=device)


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is set up once, outside of captures."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{OPERATOR}: baseline has not seen these tables and this batch yet, and cannot set them up inside a CUDA graph "
            "capture: call the operator once with this shape before capturing"
        )
    return torch.tensor(values, dtype=dtype, device=device)
