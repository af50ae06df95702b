"""First weights of the tables, the same whatever the sharding: a table's rows depend on the seed and its name alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

CHUNK_ELEMENTS = 1 << 22  # bounds the memory of drawing a table that this rank holds a slice of


@torch.no_grad()
def fill_tables(weights: Mapping[str, torch.Tensor | ShardedTensor], seed: int) -> None:
    """Fill tables [rows, dim], whole or sharded, from uniform(-1/sqrt(rows), 1/sqrt(rows)), in place.

    `weights` is keyed by name.
    """
    for name, weight in weights.items():
        rows, dim = weight.size()
        if isinstance(weight, ShardedTensor):
            slices = [(s.tensor, tuple(s.metadata.shard_offsets)) for s in weight.local_shards()]
        else:
            slices = [(weight, (0, 0))]
        if not slices:
            continue
        # torch's generator on the CPU takes 32 bits of a seed.
        mixed = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest())
        generator = torch.Generator().manual_seed(mixed)
        bound = 1 / math.sqrt(rows)
        step = max(1, CHUNK_ELEMENTS // dim)
        for first in range(0, rows, step):
            drawn = torch.empty(min(step, rows - first), dim).uniform_(-bound, bound, generator=generator)
            for tensor, (row, column) in slices:
                if row or tensor.shape[0] != rows:
                    raise ValueError(f"{name} is sharded by rows; only whole tables and column slices are")
                tensor[first : first + len(drawn)] = drawn[:, column : column + tensor.shape[1]]
