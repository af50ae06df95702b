"""TorchRec's sharded EmbeddingBagCollection with lookup and pooled exchange fused.

Plan, index distribution, weights, optimizer states and state-dict names are TorchRec's own, so a checkpoint doesn't
know which of the two wrote it. Only what follows the index distribution differs: TorchRec looks up, exchanges and
reorders; here one `fused_ops.embedding_all_to_all` stores pooled rows where the model reads them.

Per rank, with L local features (column slices count one each), B samples over all ranks, b of them here:

    indices [nnz], offsets [L * B + 1]  ->  KeyedTensor [b, sum of all dims], keys in the collection's own order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import LazyAwaitable, LazyNoWait, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

import fused_ops
from fused_ops.symmetric.group import group_name

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
}


@dataclass
class JoinedIndices:
    """One step's indices for all local features, as the operator takes them, and the layout that all ranks have in it."""

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    layout: fused_ops.EmbeddingLayout


class FusedShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """Tables share one pooling and one dtype, else ValueError. `comm` and `require_fused` go to the operator."""

    def __init__(self, *args: Any, comm: str = "fused", require_fused: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        poolings = {config.pooling.value for config in self._embedding_bag_configs}
        dtypes = {config.data_type for config in self._embedding_bag_configs}
        if len(poolings) > 1 or len(dtypes) > 1:
            raise ValueError(f"fused tables share one pooling and one dtype; got {poolings} and {dtypes}")
        self._comm, self._require_fused = comm, require_fused
        self._group = group_name(self._env.process_group)
        self._pooling = poolings.pop().lower()
        self._names, self._dims, self._placement = _final_columns(self)
        self._kernels = [kernel for lookup in self._lookups for kernel in lookup._emb_modules]
        self._feature_tables = _feature_tables(self._kernels)
        self._in_backward = all(
            sharding.compute_kernel == EmbeddingComputeKernel.FUSED.value
            for sharding in self.module_sharding_plan.values()
        )
        self._shards = [table for kernel in self._kernels for table in kernel.split_embedding_weights()]
        self._optimizer = self._make_optimizer() if self._in_backward else None
        self._layouts: dict[tuple[int, ...], fused_ops.EmbeddingLayout] = {}

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        pooled = self.embed(self.join(ctx, input))
        return LazyNoWait(KeyedTensor(keys=self._names, length_per_key=self._dims, values=pooled, key_dim=1))

    def join(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> JoinedIndices:
        """What `embed` needs that a compiler should not see: the sharding groups made one, today's learning rate."""
        batch_sizes = tuple(ctx.sharding_contexts[0].batch_size_per_rank) or (input[0].stride(),)
        if self._optimizer is not None and self._kernels:
            self._optimizer.learning_rate = self._kernels[0].emb_module.get_learning_rate()
        return JoinedIndices(*_join(input, self._is_weighted, self._device), self._layout(batch_sizes))

    def embed(self, joined: JoinedIndices) -> torch.Tensor:
        """[b, sum of all dims], features in the collection's own order. A compiler takes it in whole."""
        return fused_ops.embedding_all_to_all(
            self._tables(),
            joined.indices,
            joined.offsets,
            joined.layout,
            feature_tables=self._feature_tables,
            pooling=self._pooling,
            per_sample_weights=joined.weights,
            optimizer=self._optimizer,
            group=self._group,
            comm=self._comm,
            require_fused=self._require_fused,
        )

    def _tables(self) -> list[torch.Tensor]:
        """Shards [rows, columns] in the order of TorchRec's kernels: views of its weights."""
        if self._in_backward:
            return self._shards
        # `split`, so that autograd gathers the gradients of all tables in one piece.
        parts = [
            part
            for kernel in self._kernels
            for part in kernel.emb_module.weights.split([t.numel() for t in kernel.split_embedding_weights()])
        ]
        return [part.view(shard.shape) for part, shard in zip(parts, self._shards, strict=True)]

    def _layout(self, batch_sizes: tuple[int, ...]) -> fused_ops.EmbeddingLayout:
        if batch_sizes not in self._layouts:
            if len(self._layouts) >= 64:  # ragged batches
                self._layouts.clear()
            self._layouts[batch_sizes] = fused_ops.EmbeddingLayout(
                feature_dims=self._placement.dims,
                feature_columns=self._placement.columns,
                batch_sizes=batch_sizes,
                total_dim=sum(self._dims),
                dtype=data_type_to_dtype(self._embedding_bag_configs[0].data_type),
            )
        return self._layouts[batch_sizes]

    def _make_optimizer(self) -> fused_ops.FusedOptimizer:
        """TorchRec's optimizer, its states as views."""
        params = {
            key: value
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
            for key, value in (info.fused_params or {}).items()
        }
        kind = OPTIMIZERS[params["optimizer"]]
        modules = [kernel.emb_module for kernel in self._kernels]
        tables = [] if kind == "sgd" else [states for m in modules for states in m.split_optimizer_states()]
        states = [state for one_of_each in zip(*tables, strict=True) for state in one_of_each]
        if kind == "adam":  # FBGEMM's own count of steps; a rank without tables has none
            states.append(modules[0].iter if modules else torch.zeros(1, dtype=torch.int64, device=self._device))
        return fused_ops.FusedOptimizer(
            kind, learning_rate=params["learning_rate"], eps=params["eps"], states=states, device=self._device
        )


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection into the fused collection.

    `fused_params` names `optimizer`, `learning_rate` and `eps` of tables that are updated in backward.
    """

    def __init__(self, fused_params: dict[str, Any], comm: str = "fused", require_fused: bool = False) -> None:
        optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
        if optimizer not in OPTIMIZERS:
            allowed = ", ".join(OPTIMIZERS.values())
            raise ValueError(f"{optimizer} can't be fused into backward; allowed: {allowed}")
        super().__init__(fused_params=fused_params)
        self._comm, self._require_fused = comm, require_fused

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedEmbeddingBagCollection:
        return FusedShardedEmbeddingBagCollection(
            module,
            params,
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            comm=self._comm,
            require_fused=self._require_fused,
        )

    @property
    def sharded_module_type(self) -> type[FusedShardedEmbeddingBagCollection]:
        return FusedShardedEmbeddingBagCollection


@dataclass(frozen=True)
class _Placement:
    """`dims[r][f]`, `columns[r][f]`: width, and first output column, of rank r's f-th local feature."""

    dims: list[list[int]]
    columns: list[list[int]]


def _final_columns(collection: ShardedEmbeddingBagCollection) -> tuple[list[str], list[int], _Placement]:
    """Names and dims of the output in the collection's own order, and where each rank's slices land in it."""
    dim_of = dict(zip(collection._embedding_names, collection._embedding_dims, strict=True))
    names: list[str] = []
    for config in collection._embedding_bag_configs:
        # A feature that several tables look up is called feature@table.
        names += [f if f in dim_of else f"{f}@{config.name}" for f in config.feature_names]
    start, at = {}, 0
    for name in names:
        start[name] = at
        at += dim_of[name]

    ranks = range(collection._env.world_size)
    dims: list[list[int]] = [[] for _ in ranks]
    columns: list[list[int]] = [[] for _ in ranks]
    for sharding in collection._embedding_shardings:
        for rank in ranks:
            for group in sharding._grouped_embedding_configs_per_rank[rank]:
                slices = zip(
                    group.embedding_names(), group.embedding_dims(), group.embedding_shard_metadata(), strict=True
                )
                for name, dim, metadata in slices:
                    dims[rank].append(dim)
                    columns[rank].append(start[name] + metadata.shard_offsets[1])
    return names, [dim_of[name] for name in names], _Placement(dims, columns)


def _feature_tables(kernels: list[Any]) -> list[int]:
    """Local feature -> local table, over all kernels."""
    tables, first = [], 0
    for kernel in kernels:
        tables += [first + table for table in kernel._feature_table_map]
        first += len(kernel.config.embedding_tables)
    return tables


def _join(
    inputs: KJTList, weighted: bool, device: torch.device | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The sharding groups' indices and offsets as one feature-major jagged tensor. A single group is taken as it is."""
    kjts = [kjt for kjt in inputs if kjt.keys()]
    if not kjts:
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return nothing[:0], nothing, None
    if len(kjts) == 1:
        return kjts[0].values(), kjts[0].offsets(), kjts[0].weights() if weighted else None
    offsets, nnz = [kjts[0].offsets()[:1]], 0
    for kjt in kjts:
        offsets.append(kjt.offsets()[1:] + nnz)
        nnz += kjt.values().numel()
    weights = torch.cat([kjt.weights() for kjt in kjts]) if weighted else None
    return torch.cat([kjt.values() for kjt in kjts]), torch.cat(offsets), weights
