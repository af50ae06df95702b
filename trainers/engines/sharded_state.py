"""Optimizer states as flat dictionaries that `torch.distributed.checkpoint` can save, load in place and reshard.

Keys are `<parameter>|<state>`. A table's state is sharded as the table is. Row-wise Adagrad keeps one number a row *of
each column slice*, so its state is [slices * rows], slice after slice; `regroup` turns one number of slices into
another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

# What torch's optimizers keep of a table, but for Adam's step, which is the same for all.
STATES = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}


def dense(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States of replicated parameters, the same on every rank."""
    return {
        f"{name}|{key}": value for name, p in parameters.items() for key, value in optimizer.state.get(p, {}).items()
    }


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


def with_states(adam: torch.optim.Adam) -> torch.optim.Adam:
    """With the states that torch makes in the first step only, so that a checkpoint can be loaded before it."""
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return adam


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


def regroup(saved: torch.Tensor, rows: int, slices: int) -> torch.Tensor:
    """Row-wise states [m * rows] of m equal column slices as those of `slices` equal slices, [slices * rows].

    A slice's number is a mean over its columns: wider slices average what they cover, narrower ones inherit.
    """
    m = saved.numel() // rows
    saved = saved.view(m, rows)
    if slices % m == 0:
        return saved.repeat_interleave(slices // m, dim=0).reshape(-1)
    if m % slices == 0:
        return saved.view(slices, m // slices, rows).mean(dim=1).reshape(-1)
    fine = saved.repeat_interleave(slices, dim=0)  # m * slices slices
    return fine.view(slices, m, rows).mean(dim=1).reshape(-1)
