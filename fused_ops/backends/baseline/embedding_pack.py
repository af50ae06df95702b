"""Packs an output gradient by table owner in few kernels, however the owners' columns are scattered."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fused_ops.backends.baseline.fbgemm_metadata import on_device
from fused_ops.embedding_columns import merged_runs, pack
from fused_ops.embedding_layout import EmbeddingLayout

FEW_RUNS = 2  # a rank: a copy of each run is then no more work than gathering them first


def packed_by_owner(grad: Tensor, layout: EmbeddingLayout, rank: int) -> Tensor:
    """`embedding_columns.pack`: [b, total_dim] -> flat blocks [b, D_r], one a table owner."""
    _, _, widths = merged_runs(layout)
    if not grad.is_cuda or len(widths) <= FEW_RUNS * layout.world:
        return pack(grad, layout, rank)
    return gathered_by_owner(grad, layout)


def gathered_by_owner(grad: Tensor, layout: EmbeddingLayout) -> Tensor:
    """The same by one gather and one copy a rank."""
    packed = grad.new_empty(grad.numel())
    gathered = grad.index_select(1, _columns_by_owner(layout, grad.device))
    widths = [layout.local_dim(r) for r in range(layout.world)]
    blocks = packed.split([len(grad) * width for width in widths])
    for block, columns in zip(blocks, gathered.split(widths, dim=1), strict=True):
        block.view(columns.shape).copy_(columns)
    return packed


@functools.lru_cache(maxsize=256)
def _columns_by_owner(layout: EmbeddingLayout, device: torch.device) -> Tensor:
    _, starts, widths = merged_runs(layout)
    columns = [c for start, width in zip(starts, widths, strict=True) for c in range(start, start + width)]
    return on_device(columns, torch.int64, device)
