"""Causal self-attention, heads split over ranks; grouped queries (Ainslie et al., arXiv 2305.13245); PyTorch's SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.parallel.linear import ColumnParallelLinear, RowParallelLinear
from models.parallel.shards import even_split
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.kv_cache import KVCache
from models.transformer.rotary import rotate


@dataclass(frozen=True)
class Sequences:
    """What all layers of one forward share. Activations are [M, H], M = batch * length, a sequence's tokens in a run.

    positions: [batch, length] int64. rotation: `rotary.rotation` of them, or None.
    mask: bool [batch, 1, length, keys], True = may attend; None = causal.
    total_rows: M where ranks hold rows of the activations, else None.
    """

    batch: int
    length: int
    positions: Tensor
    rotation: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    total_rows: int | None
    cache: KVCache | None = None


def local_kv_heads(config: TransformerConfig, tp: TensorParallel) -> int:
    """KV heads of this rank, or ValueError where a rank would have none."""
    if config.num_kv_heads < tp.world:
        raise ValueError(
            f"{config.num_kv_heads} KV heads cannot be split over {tp.world} ranks; use at most that many ranks"
        )
    start, stop = even_split(config.num_kv_heads, tp.world, tp.rank)
    return stop - start


class Attention(nn.Module):
    """qkv: column-parallel; its columns are groups, one a KV head: the group's query heads, its key head, its value head.

    So whole groups go to a rank, and a rank's weight is one run of the whole weight's rows. out: row-parallel.
    """

    def __init__(self, config: TransformerConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.size_of_head
        self.kv_heads = local_kv_heads(config, tp)
        self.queries_per_group = config.heads // config.num_kv_heads
        group = (self.queries_per_group + 2) * self.head_dim
        self.qkv = ColumnParallelLinear(config.width, config.num_kv_heads, group, bias=config.bias, tp=tp)
        self.out = RowParallelLinear(
            config.num_kv_heads, self.queries_per_group * self.head_dim, config.width, bias=config.bias, tp=tp
        )

    def forward(self, input: Tensor, sequences: Sequences) -> Tensor:
        """[M, H] of [M, H], or this rank's rows of this rank's rows."""
        batch, length = sequences.batch, sequences.length
        qkv = self.qkv(input, sequences.total_rows)
        qkv = qkv.view(batch, length, self.kv_heads, self.queries_per_group + 2, self.head_dim)
        queries, keys, values = qkv.split([self.queries_per_group, 1, 1], dim=3)
        queries, keys, values = queries.flatten(2, 3), keys.squeeze(3), values.squeeze(3)
        if sequences.rotation is not None:
            queries, keys = rotate(queries, *sequences.rotation), rotate(keys, *sequences.rotation)
        if sequences.cache is not None:
            keys, values = sequences.cache.write(self.layer, sequences.positions, keys, values)
            queries = queries.to(keys.dtype)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=sequences.mask,
            is_causal=sequences.mask is None,
            enable_gqa=self.queries_per_group > 1,
        )
        attended = attended.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return self.out(attended.to(qkv.dtype), sequences.total_rows)
