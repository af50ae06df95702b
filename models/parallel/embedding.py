"""Vocabulary-parallel embedding (Megatron-LM, arXiv 1909.08053): each rank holds some rows of the table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.parallel.collectives import reduce_rows
from models.parallel.range_check import outside
from models.parallel.shards import Shard, even_split
from models.parallel.tensor_parallel import TensorParallel
from models.parallel.vocabulary import padded_vocabulary


class VocabularyParallelEmbedding(nn.Module):
    """weight: [V_r, H] of the table [V, H], V = `vocabulary` rounded up to a multiple of `multiple`.

    Rows from `vocabulary` on are padding, never looked up and never a target.
    """

    def __init__(self, vocabulary: int, width: int, multiple: int, tp: TensorParallel) -> None:
        super().__init__()
        self.vocabulary, self.tp = vocabulary, tp
        rows = padded_vocabulary(vocabulary, multiple)
        if rows < tp.world:
            raise ValueError(f"a vocabulary of {rows} (padded) cannot be split over {tp.world} ranks")
        shard = Shard(0, rows, *even_split(rows, tp.world, tp.rank))
        self.weight = nn.Parameter(torch.empty(shard.size, width))
        self.shards = {"weight": shard}

    def forward(self, tokens: Tensor, replicated: Tensor | None = None, scatter: bool = False) -> Tensor:
        """Rows of `tokens` [M] (int64, the same on all ranks), plus `replicated` [M, H] (learned positions).

        Returns [M, H], or this rank's rows [M_r, H] with `scatter`. A token outside the vocabulary is a ValueError on the
        CPU, and a row of NaN on a device.
        """
        bad = outside(tokens, self.vocabulary, "token")
        shard = self.shards["weight"]
        elsewhere = (tokens < shard.start) | (tokens >= shard.stop)
        rows = F.embedding((tokens - shard.start).masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0).masked_fill(bad.unsqueeze(-1), float("nan"))
        return reduce_rows(rows, replicated, self.tp, scatter)
