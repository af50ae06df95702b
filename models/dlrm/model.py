"""A DLRM from TorchRec's architecture modules: bottom MLP, embedding bags, interaction (dot or DCNv2), top MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionDCNArch, SparseArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from models.dlrm.index_distribution import DistributedIndices, check_range, rows_of_features
from models.dlrm.sharded_embeddings import JoinedIndices

Features: TypeAlias = KeyedJaggedTensor | DistributedIndices | JoinedIndices

POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
EMBEDDING_DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


class DLRMConfig(Protocol):
    """What a DLRM is built from (`trainers.config.ModelConfig` has these fields and more)."""

    num_dense: int
    embedding_dim: int
    table_rows: list[int]
    multi_hot_sizes: list[int] | None
    bottom_mlp: list[int]
    top_mlp: list[int]
    interaction: str
    dcn_layers: int
    dcn_low_rank: int
    pooling: str
    embedding_dtype: str


def feature_name(table: int) -> str:
    return f"cat_{table}"


def table_name(table: int) -> str:
    return f"table_{table}"


def embedding_tables(config: DLRMConfig) -> list[EmbeddingBagConfig]:
    """One table a categorical feature, in the order of `config.table_rows`."""
    return [
        EmbeddingBagConfig(
            name=table_name(t),
            embedding_dim=config.embedding_dim,
            num_embeddings=rows,
            feature_names=[feature_name(t)],
            pooling=POOLING[config.pooling],
            data_type=EMBEDDING_DTYPES[config.embedding_dtype],
        )
        for t, rows in enumerate(config.table_rows)
    ]


class PooledFeatures(SparseArch):
    """`SparseArch` in two halves, so that dense work can run while pooled embeddings travel."""

    def start(self, features: Features) -> KeyedTensor | torch.Tensor:
        """Looks up and sends off; returns a KeyedTensor or, from a sharded collection, an awaitable of one.

        From JoinedIndices, which only a fused collection takes, it returns [b, sum of all dims].
        """
        collection = self.embedding_bag_collection
        if isinstance(features, JoinedIndices):
            return collection.embed(features)
        if isinstance(features, DistributedIndices):
            try:
                return collection.compute_and_output_dist(features.context, features.indices)
            except (RuntimeError, ValueError):
                # Kernels name neither feature nor value, so look only once one has refused.
                check_range(features.indices, rows_of_features(collection))
                raise
        return collection(features)

    def finish(self, pooled: KeyedTensor | torch.Tensor, batch_size: int) -> torch.Tensor:
        """[batch_size, features, dim], features in the collection's own order."""
        if isinstance(pooled, torch.Tensor):
            return pooled.reshape(batch_size, self.F, self.D)
        if hasattr(pooled, "wait"):
            pooled = pooled.wait()
        if pooled.keys() == self.sparse_feature_names:
            values = pooled.values()
        else:
            by_name = pooled.to_dict()
            values = torch.cat([by_name[name] for name in self.sparse_feature_names], dim=1)
        return values.reshape(batch_size, self.F, self.D)

    def forward(self, features: KeyedJaggedTensor | DistributedIndices) -> torch.Tensor:
        batch_size = features.batch_size if isinstance(features, DistributedIndices) else features.stride()
        return self.finish(self.start(features), batch_size)


class CrossInteraction(InteractionDCNArch):
    """TorchRec's, on a rank without samples too."""

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """[b, (F + 1) * D] from [b, D] and [b, F, D]."""
        return self.crossnet(torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1).flatten(1))


class _Overlapped(DLRM):
    """Starts the embeddings before the bottom MLP.

    The pooled exchange of an unfused collection then runs behind the bottom MLP, and, as autograd goes back in the
    opposite order, the exchange of its gradients behind the bottom MLP's backward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._interaction_and_top

    def forward(self, dense_features: torch.Tensor, sparse_features: Features) -> torch.Tensor:
        """Logits [B] (fp32) of dense features [B, num_dense] and this rank's part of the sparse features."""
        pooled = self.sparse_arch.start(sparse_features)
        embedded_dense = self.dense_arch(dense_features)
        return self._interact(embedded_dense, self.sparse_arch.finish(pooled, dense_features.shape[0]))

    def _interaction_and_top(self, embedded_dense: torch.Tensor, embedded_sparse: torch.Tensor) -> torch.Tensor:
        """Logits [B] (fp32) of [B, D] and [B, F, D]."""
        interactions = self.inter_arch(dense_features=embedded_dense, sparse_features=embedded_sparse)
        return self.over_arch(interactions).float().squeeze(-1)

    def compile_dense(self, with_operator: bool, backend: str = "inductor") -> None:
        """torch.compile, without a graph break. `with_operator`: one graph of everything, the fused operator inside; it takes
        JoinedIndices. Else TorchRec's exchange stays between two graphs, of the bottom MLP and of what follows it."""
        if with_operator:
            self.compile(fullgraph=True, backend=backend)
            return
        self.dense_arch.compile(fullgraph=True, backend=backend)
        self._interact = torch.compile(self._interaction_and_top, fullgraph=True, backend=backend)


class DotDLRM(_Overlapped):
    """Pairwise dot products of the bottom MLP's output and the pooled embeddings."""


class CrossDLRM(_Overlapped, DLRM_DCN):
    """DCNv2: low-rank cross layers over the concatenated features."""


def build_dlrm(config: DLRMConfig, tables_device: str = "meta") -> DLRM:
    """The unsharded model, MLPs on the CPU with weights from torch's global generator.

    `tables_device="meta"` leaves the tables without storage, for sharding; "cpu" makes a model for one process.
    """
    with torch.random.fork_rng(devices=()):  # where the tables are must not change what the MLPs draw
        collection = EmbeddingBagCollection(tables=embedding_tables(config), device=torch.device(tables_device))
    shape = {
        "embedding_bag_collection": collection,
        "dense_in_features": config.num_dense,
        "dense_arch_layer_sizes": list(config.bottom_mlp),
        "over_arch_layer_sizes": list(config.top_mlp),
    }
    model: DLRM
    if config.interaction == "dot":
        model = DotDLRM(**shape)
    elif config.interaction == "dcnv2":
        model = CrossDLRM(**shape, dcn_num_layers=config.dcn_layers, dcn_low_rank_dim=config.dcn_low_rank)
        model.inter_arch = CrossInteraction(len(config.table_rows), model.inter_arch.crossnet)
    else:
        raise ValueError(f"model.interaction is {config.interaction!r}; allowed: dot, dcnv2")
    model.sparse_arch = PooledFeatures(collection)
    return model


def dense_parameter_count(config: DLRMConfig) -> int:
    """Parameters outside the tables, which every rank holds."""
    with torch.device("meta"):
        model = build_dlrm(config)
    return sum(p.numel() for name, p in model.named_parameters() if "embedding_bags" not in name)


def table_parameter_count(config: DLRMConfig) -> int:
    return sum(config.table_rows) * config.embedding_dim
