"""Tables sharded by TorchRec's DistributedModelParallel, everything else replicated by DistributedDataParallel."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from models.dlrm.index_distribution import DistributedIndices, IndexDistribution
from models.dlrm.init import fill_tables
from models.dlrm.model import build_dlrm
from models.dlrm.plan import build_plan
from models.dlrm.sharded_embeddings import FusedEmbeddingBagCollectionSharder
from trainers.config import RunConfig
from trainers.engines import sharded_state

IN_BACKWARD = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
TABLES = ".embedding_bags."


class DDPEngine:
    """Builds the model on the default process group. The first weights depend on `trainer.seed` alone."""

    def __init__(self, config: RunConfig) -> None:
        self._config, optim = config, config.optim
        if optim.in_backward and (optim.clip_norm is not None or optim.accumulate > 1):
            raise ValueError(
                "optim.clip_norm and optim.accumulate need whole gradients: set optim.in_backward=false "
                "(with optim.in_backward=true tables are updated inside backward)"
            )
        torch.manual_seed(config.trainer.seed)
        model = build_dlrm(config.model)
        self.model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=build_plan(config.model, dist.get_world_size(), in_backward=optim.in_backward, model=model),
            sharders=[_sharder(config)],
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )
        self._ddp = next(m for m in self.model.modules() if isinstance(m, DistributedDataParallel))
        self._collection = next(m for m in self.model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        self.indices = IndexDistribution(self._collection, config.model.out_of_range)
        self._tables = {name: weight for name, weight in self.model.state_dict().items() if TABLES in name}
        fill_tables(self._tables, config.trainer.seed)

        named = dict(self.model.named_parameters())
        self._dense = {name: p for name, p in named.items() if TABLES not in name}
        dense_lr = optim.lr if optim.dense_lr is None else optim.dense_lr
        self._dense_optimizer = _optimizer(optim.name, self._dense.values(), dense_lr, optim.eps, dense=True)
        self._optimizers = [(self._dense_optimizer, dense_lr)]
        # In plain-gradient mode a rank trains the tables that it holds; TorchRec registers the others as empty.
        self._slices: dict[str, torch.Tensor] = {}
        self._table_optimizer: torch.optim.Optimizer | None = None
        if not optim.in_backward:
            self._slices = {name: p for name, p in named.items() if TABLES in name and p.numel()}
        if self._slices:
            self._table_optimizer = _optimizer(optim.name, self._slices.values(), optim.lr, optim.eps, dense=False)
            self._optimizers.append((self._table_optimizer, optim.lr))
        self.set_learning_rate(1.0)

    def forward(self, dense: torch.Tensor, indices: DistributedIndices) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._config.trainer.dense_dtype == "bf16"):
            return self.model(dense, indices)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        with nullcontext() if last else self._ddp.no_sync():
            loss.backward()

    def step(self) -> None:
        if self._config.optim.clip_norm is not None:
            self._clip(self._config.optim.clip_norm)
        for optimizer, _ in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for kernel in self._kernels():
            if not self._config.optim.in_backward:
                kernel.emb_module.weights.grad = None

    def set_learning_rate(self, factor: float) -> None:
        for optimizer, base in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        if self._config.optim.in_backward:
            fused = self.model.fused_optimizer
            for group in fused.param_groups:
                group["lr"] = self._config.optim.lr * factor
            fused.step()  # TorchRec's way of handing the rate to FBGEMM; updates nothing

    def model_state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        states: dict[str, Any] = {**sharded_state.dense(self._dense_optimizer, self._dense)}
        if self._config.optim.in_backward:
            return states | sharded_state.fused(self.model.fused_optimizer)
        return states | sharded_state.plain(self._config.optim.name, self._table_optimizer, self._slices, self._tables)

    def describe(self) -> dict[str, Any]:
        model, optim = self._config.model, self._config.optim
        keys = ("num_dense", "embedding_dim", "table_rows", "bottom_mlp", "top_mlp", "interaction", "pooling")
        shape: dict[str, Any] = {f"model.{key}": getattr(model, key) for key in (*keys, "embedding_dtype")}
        if model.interaction == "dcnv2":
            shape |= {"model.dcn_layers": model.dcn_layers, "model.dcn_low_rank": model.dcn_low_rank}
        shape |= {"optim.name": optim.name, "optim.in_backward": optim.in_backward}
        return {key: list(value) if isinstance(value, (list, tuple)) else value for key, value in shape.items()}

    def exchanges(self) -> Iterable[nn.Module]:
        return [] if _runs_operator(self._config) else list(self._collection._output_dists)

    def close(self) -> None:
        # DDP's reducer and TorchRec's awaitables hold the group; left to interpreter exit they end it with a crash.
        self.__dict__.clear()
        gc.collect()

    def _kernels(self) -> list[Any]:
        return [kernel for lookup in self._collection._lookups for kernel in lookup._emb_modules]

    def _clip(self, limit: float) -> None:
        """By the norm over all parameters: replicated ones once, tables over all their shards."""
        dense = [p.grad for p in self._dense.values() if p.grad is not None]
        tables = [p.grad for p in self._slices.values() if p.grad is not None]
        squares = torch.zeros(2, dtype=torch.float64)
        for i, grads in enumerate((dense, tables)):
            squares[i] = sum((g.double().square().sum() for g in grads), start=torch.zeros((), dtype=torch.float64))
        dist.all_reduce(shard_squares := squares[1:])
        norm = float((squares[0] + shard_squares[0]).sqrt())
        if norm > limit:
            for grad in (*dense, *tables):
                grad.mul_(limit / norm)


def _runs_operator(config: RunConfig) -> bool:
    return config.comm.embedding_all_to_all != "baseline"


def _sharder(config: RunConfig) -> EmbeddingBagCollectionSharder:
    optim = config.optim
    params: dict[str, Any] = {}
    if optim.in_backward:
        params = {"optimizer": IN_BACKWARD[optim.name], "learning_rate": optim.lr, "eps": optim.eps}
        params["bounds_check_mode"] = BoundsCheckMode.FATAL
    if config.model.embedding_dtype == "fp16":
        params["output_dtype"] = SparseType.FP16  # dtype in, dtype out, in both modes
    if _runs_operator(config):
        mode, backend = config.comm.embedding_all_to_all, config.comm.backend
        comm = mode if mode == "unfused" or backend == "auto" else backend
        return FusedEmbeddingBagCollectionSharder(params, comm=comm, require_fused=config.comm.require_fused)
    return EmbeddingBagCollectionSharder(fused_params=params)


def _optimizer(
    name: str, parameters: Iterable[torch.Tensor], lr: float, eps: float, *, dense: bool
) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(list(parameters), lr=lr)
    if name == "rowwise_adagrad" and not dense:
        return RowWiseAdagrad(list(parameters), lr=lr, eps=eps)
    return torch.optim.Adagrad(list(parameters), lr=lr, eps=eps)
