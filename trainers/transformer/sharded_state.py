"""Split tensors for `torch.distributed.checkpoint`: it saves every part once and loads any part at any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from models.parallel.shards import Shard


class SplitState:
    """Knows which part of each parameter the ranks of `group` hold; `shards` says which this one has. Collective."""

    def __init__(self, shards: Mapping[str, Shard], group: dist.ProcessGroup | None) -> None:
        self._shards, self._group = (shards if group is not None else {}), group
        self._spans: dict[str, list[tuple[int, int]]] = {}
        if group is not None:
            mine = {name: (shard.start, shard.stop) for name, shard in shards.items()}
            of_ranks: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size(group)
            dist.all_gather_object(of_ranks, mine, group=group)
            self._spans = {name: [spans[name] for spans in of_ranks] for name in mine}

    def wrap(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | ShardedTensor]:
        """The tensors, those of split parameters as ShardedTensors that share their memory.

        Keys are parameters, or `<parameter>|<state>`; a state without dimensions is not split.
        """
        found: dict[str, Tensor | ShardedTensor] = {}
        for key, tensor in tensors.items():
            name = key.split("|")[0]
            found[key] = self._sharded(name, tensor.detach()) if name in self._shards and tensor.dim() else tensor
        return found

    def _sharded(self, name: str, tensor: Tensor) -> ShardedTensor:
        assert self._group is not None
        shard, ranks = self._shards[name], dist.get_process_group_ranks(self._group)
        whole = shard.full_shape(tensor.shape)
        parts = []
        for rank, (start, stop) in zip(ranks, self._spans[name], strict=True):
            offsets, sizes = [0] * len(whole), list(whole)
            offsets[shard.dim], sizes[shard.dim] = start, stop - start
            parts.append(ShardMetadata(offsets, sizes, f"rank:{rank}/{tensor.device}"))
        mine = LocalShard(tensor, parts[ranks.index(dist.get_rank())])
        metadata = ShardedTensorMetadata(parts, whole, TensorProperties(dtype=tensor.dtype, requires_grad=False))
        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # DTensor cannot say where uneven parts begin
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                [mine], metadata, process_group=self._group
            )
