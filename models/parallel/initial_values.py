"""First weights, the same for every number of ranks: a whole parameter depends on the seed and its name alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from models.parallel.shards import Shard

CHUNK_ELEMENTS = 1 << 22  # drawn at a time, whatever the rank holds; another number would be other weights


@torch.no_grad()
def fill_normal(parameter: nn.Parameter, shard: Shard | None, name: str, std: float, seed: int) -> None:
    """Fill this rank's part of the parameter `name` from N(0, std^2), drawn in fp32 on the CPU."""
    # torch's generator on the CPU takes 32 bits of a seed.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest())
    generator = torch.Generator().manual_seed(mixed)
    shape = parameter.shape if shard is None else shard.full_shape(parameter.shape)
    # [slices, rows, columns]: `rows` is the dimension that is split, or the first.
    dim = 0 if shard is None else shard.dim
    slices, rows, columns = shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel()
    start, stop = (0, rows) if shard is None else (shard.start, shard.stop)
    held = parameter.view(slices, stop - start, columns)
    step = max(1, CHUNK_ELEMENTS // columns)
    for piece in range(slices):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            drawn = torch.empty(last - first, columns).normal_(0, std, generator=generator)
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                _copy(held[piece, begin - start : end - start], drawn[begin - first : end - first])


def _copy(target: Tensor, values: Tensor) -> None:
    target.copy_(values)
