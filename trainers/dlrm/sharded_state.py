"""Optimizer states of tables, flat (see `trainers.optimizer_states`) and sharded as the tables are.

Row-wise Adagrad keeps one number a row *of each column slice*, so its state is [slices * rows], slice after slice;
`optimizer_states.regroup` turns one number of slices into another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

# What torch's optimizers keep of a table, but for Adam's step, which is the same for all.
STATES = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}


def fused(optimizer: KeyedOptimizer) -> dict[str, ShardedTensor]:
    """States that TorchRec's in-backward optimizer keeps: views into FBGEMM's own memory."""
    return {
        f"{name}|{key.rsplit('.', 1)[-1]}": value
        for name, states in optimizer.state_dict()["state"].items()
        for key, value in states.items()
    }


def plain(
    kind: str,
    optimizer: torch.optim.Optimizer | None,
    slices: Mapping[str, torch.Tensor],
    tables: Mapping[str, ShardedTensor],
) -> dict[str, ShardedTensor]:
    """States of a torch optimizer over this rank's slices of the tables; every rank describes every table.

    `slices` and `tables` are keyed by parameter name; a rank that holds no slice of a table has no such key in
    `slices`, and a rank without any has no optimizer.
    """
    states = {}
    for name, weight in tables.items():
        held = optimizer.state[slices[name]] if optimizer is not None and name in slices else {}
        for key in STATES[kind]:
            states[f"{name}|{key}"] = _like(weight, held.get(key), rowwise=kind == "rowwise_adagrad")
    return states


def _like(weight: ShardedTensor, state: torch.Tensor | None, rowwise: bool) -> ShardedTensor:
    """`state`, this rank's slices one below the other, sharded as `weight` is: [rows, dim], or [slices * rows]."""
    metadata = copy.deepcopy(weight.metadata())
    rows = weight.size(0)
    if rowwise:
        order = sorted(shard.shard_offsets[1] for shard in metadata.shards_metadata)
        metadata.size = torch.Size([rows * len(order)])
    placed = {}
    for shard in metadata.shards_metadata:
        place = tuple(shard.shard_offsets)
        if rowwise:
            shard.shard_offsets, shard.shard_sizes = [order.index(place[1]) * rows], [rows]
        placed[place] = shard
    metadata.tensor_properties.dtype = torch.float32 if state is None else state.dtype
    shards = []
    if state is not None:
        held = weight.local_shards()
        for part, local in zip(state.chunk(len(held)), held, strict=True):
            shards.append(Shard(part.view(-1) if rowwise else part, placed[tuple(local.metadata.shard_offsets)]))
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
