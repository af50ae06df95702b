"""First weights, the same for every number of ranks: a whole parameter depends on the seed and its name alone."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from models.parallel.shards import Shard

CHUNK_ELEMENTS = 1 << 22  # drawn at a time, whatever the rank holds; another number would be other weights


@torch.no_grad()
def fill_normal(parameter: nn.Parameter, shard: Shard | None, name: str, std: float, seed: int) -> None:
    """Fill this rank's part of the parameter `name` from N(0, std^2), drawn in fp32 on the CPU."""
    # torch's generator on the CPU takes 32 bits of a seed.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest())
    generator = torch.Generator().manual_seed(mixed)
    shard = shard or Shard(0, parameter.shape[0], 0, parameter.shape[0])
    rows, *rest = shard.full_shape(parameter.shape)
    step = max(1, CHUNK_ELEMENTS // max(1, torch.Size(rest).numel()))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        drawn = torch.empty(last - first, *rest).normal_(0, std, generator=generator)
        if shard.dim:
            parameter[first:last] = shard.of(drawn)
            continue
        begin, end = max(first, shard.start), min(last, shard.stop)
        if begin < end:
            parameter[begin - shard.start : end - shard.start] = drawn[begin - first : end - first]
