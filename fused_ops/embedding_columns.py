"""Between the packed order of an exchange (rank after rank, features side by side) and the output's columns."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from fused_ops.embedding_layout import EmbeddingLayout


@functools.lru_cache(maxsize=1024)
def merged_runs(layout: EmbeddingLayout) -> tuple[list[int], list[int], list[int]]:
    """(first run of each rank [W + 1], column, width): each rank's features as runs of adjacent columns, in packed order."""
    begin, starts, widths = [0], [], []
    for columns, dims in zip(layout.feature_columns, layout.feature_dims, strict=True):
        end = None
        for column, dim in zip(columns, dims, strict=True):
            if column == end:
                widths[-1] += dim
            else:
                starts.append(column)
                widths.append(dim)
            end = column + dim
        begin.append(len(starts))
    return begin, starts, widths


def sample_starts(layout: EmbeddingLayout) -> list[int]:
    """Where each rank's samples start in the global batch [W + 1]."""
    return list(itertools.accumulate(layout.batch_sizes, initial=0))


def received_sizes(layout: EmbeddingLayout, rank: int) -> list[int]:
    """Elements that `rank` receives from each rank in forward, and sends to it in backward."""
    return [layout.batch_sizes[rank] * layout.local_dim(r) for r in range(layout.world)]


def sent_sizes(layout: EmbeddingLayout, rank: int) -> list[int]:
    """Elements that `rank` sends to each rank in forward, and receives from it in backward."""
    return [size * layout.local_dim(rank) for size in layout.batch_sizes]


def _blocks(packed: Tensor, layout: EmbeddingLayout, rank: int) -> list[tuple[int, Tensor]]:
    """(column, [b, width]) of every run, as views of the flat blocks [b, D_r], one a rank."""
    begin, columns, widths = merged_runs(layout)
    pieces: list[tuple[int, Tensor]] = []
    for r, block in enumerate(packed.split(received_sizes(layout, rank))):
        runs = slice(begin[r], begin[r + 1])
        block = block.view(layout.batch_sizes[rank], layout.local_dim(r))
        pieces += zip(columns[runs], block.split(widths[runs], dim=1), strict=True)
    return pieces


def reorder(packed: Tensor, layout: EmbeddingLayout, rank: int) -> Tensor:
    """Flat blocks [b, D_r], one a source rank -> [b, total_dim] in the layout's columns."""
    pieces = sorted(_blocks(packed, layout, rank), key=lambda piece: piece[0])
    if not pieces:
        return packed.new_empty((layout.batch_sizes[rank], 0))
    return torch.cat([piece for _, piece in pieces], dim=1)


def pack(grad: Tensor, layout: EmbeddingLayout, rank: int) -> Tensor:
    """[b, total_dim] -> flat blocks [b, D_r], one a table owner: what `reorder` undoes."""
    packed = grad.new_empty(grad.numel())
    for column, piece in _blocks(packed, layout, rank):
        piece.copy_(grad[:, column : column + piece.shape[1]])
    return packed
