"""Tables sharded by TorchRec's DistributedModelParallel, everything else replicated by DistributedDataParallel."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import fused_ops
from models.dlrm.index_distribution import DistributedIndices, IndexDistribution, check_range, rows_of_features
from models.dlrm.init import fill_tables
from models.dlrm.model import build_dlrm
from models.dlrm.plan import build_plan
from models.dlrm.sharded_embeddings import FusedEmbeddingBagCollectionSharder, FusedShardedEmbeddingBagCollection
from trainers import device, optimizer_states
from trainers.config import RunConfig
from trainers.data.batch import Batch
from trainers.dlrm import sharded_state
from trainers.dlrm.config import DLRMConfig
from trainers.dlrm.feed import ClickFeed, ClickWork
from trainers.dlrm.metrics import ClickEvaluation
from trainers.engine import Replica
from trainers.step_timing import StepTimer

IN_BACKWARD = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
# On a GPU a FATAL check ends the process's CUDA context; FBGEMM counts there, and the engine looks when the step is over.
BOUNDS_CHECKS = {"cpu": BoundsCheckMode.FATAL, "cuda": BoundsCheckMode.WARNING}
STEPS = "tables|step"
TABLES = ".embedding_bags."


class DDPEngine:
    """Builds the model on the default process group. The first weights depend on `trainer.seed` alone."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.model, DLRMConfig)
        self._config, self._shape, optim = config, config.model, config.optim
        if optim.in_backward and (optim.clip_norm is not None or optim.accumulate > 1):
            raise ValueError(
                "optim.clip_norm and optim.accumulate need whole gradients: set optim.in_backward=false "
                "(with optim.in_backward=true tables are updated inside backward)"
            )
        self.device = device.current(config.trainer)
        world = dist.get_world_size()
        self.replica = Replica(dist.get_rank(), world, tuple(range(world)))
        torch.manual_seed(config.trainer.seed)
        model = build_dlrm(self._shape)
        plan = build_plan(
            self._shape,
            world,
            in_backward=optim.in_backward,
            model=model,
            devices=_devices_of_ranks(self.device),
        )
        self.model = DistributedModelParallel(
            model,
            device=self.device,
            plan=plan,
            sharders=[_sharder(config)],
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )
        self._ddp = next(m for m in self.model.modules() if isinstance(m, DistributedDataParallel))
        self._collection = next(m for m in self.model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        unchecked = self.device.type == "cuda" and not optim.in_backward and not _runs_operator(config)
        self.indices = IndexDistribution(self._collection, self._shape.out_of_range, guard=unchecked)
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
        # Adam's step for the tables, one more than in FBGEMM's kernels, which count evaluations too.
        self._steps = torch.zeros(1, dtype=torch.int64)
        if config.trainer.compile:
            # DDP would cut the graph into buckets, through the operator's effects.
            torch._dynamo.config.optimize_ddp = False
            model.compile_dense(with_operator=_runs_operator(config), backend=config.trainer.compile_backend)
        self.set_learning_rate(1.0)

    def forward(self, dense: torch.Tensor, indices: DistributedIndices) -> torch.Tensor:
        """Logits [b] in fp32 of this rank's b samples."""
        features: Any = indices
        if self._config.trainer.compile and isinstance(self._collection, FusedShardedEmbeddingBagCollection):
            features = self._collection.join(indices.context, indices.indices)
        enabled = self._config.trainer.dense_dtype == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            return self.model(dense, features)

    def feed(self, batches: Iterator[Batch], timer: StepTimer) -> ClickFeed:
        return ClickFeed(batches, self.indices, self.device, timer, self._shape)

    def loss(self, work: ClickWork) -> torch.Tensor:
        work.logits = self.forward(work.batch.dense, work.indices)
        return binary_cross_entropy_with_logits(work.logits, work.batch.labels.float(), reduction="sum")

    def evaluation(self) -> ClickEvaluation:
        return ClickEvaluation(lambda work: self.forward(work.batch.dense, work.indices))

    def throughput(self, total: int, samples: int, seconds: float) -> dict[str, float | None]:
        return {"samples_per_s": samples / seconds}

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
        self._steps += 1

    def check(self, work: ClickWork) -> None:
        self.indices.check()
        try:
            fused_ops.check_errors()
        except ValueError:
            check_range(work.indices.indices, rows_of_features(self._collection))
            raise
        if self.device.type == "cuda" and self._config.optim.in_backward and not _runs_operator(self._config):
            counts = [kernel.emb_module.bounds_check_warning for kernel in self._kernels()]
            if counts and int(torch.cat(counts).sum()):
                raise ValueError("an index is outside its table; FBGEMM has printed which, and looked up row 0")

    def set_learning_rate(self, factor: float) -> None:
        if self._config.optim.name == "adam":
            self._count_steps()
        for optimizer, base in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        if self._config.optim.in_backward:
            fused = self.model.fused_optimizer
            for group in fused.param_groups:
                group["lr"] = self._config.optim.lr * factor
            fused.step()  # TorchRec's way of handing the rate to FBGEMM; updates nothing

    def _count_steps(self) -> None:
        """Hand Adam's step, which a checkpoint may have brought, to whoever updates the tables."""
        for kernel in self._kernels() if self._config.optim.in_backward else ():
            kernel.emb_module.iter_cpu.fill_(int(self._steps))
            kernel.emb_module.iter.fill_(int(self._steps))
        if self._table_optimizer is not None:
            for state in self._table_optimizer.state.values():
                state["step"].fill_(float(self._steps))

    def model_state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        states: dict[str, Any] = {**optimizer_states.flat(self._dense_optimizer, self._dense)}
        if self._config.optim.name == "adam":
            states[STEPS] = self._steps
        if self._config.optim.in_backward:
            return states | sharded_state.fused(self.model.fused_optimizer)
        return states | sharded_state.plain(self._config.optim.name, self._table_optimizer, self._slices, self._tables)

    def loaded(self) -> None:
        """States are views into the memory that trains."""

    def describe(self) -> dict[str, Any]:
        model, optim = self._shape, self._config.optim
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


def _devices_of_ranks(device: torch.device) -> list[torch.device] | None:
    """Where each rank's tables live; None on the CPU, which has no numbers. Several ranks may share a card."""
    if device.type == "cpu":
        return None
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, str(device))
    return [torch.device(name) for name in names]


def _runs_operator(config: RunConfig) -> bool:
    return config.comm.embedding_all_to_all != "baseline"


def _sharder(config: RunConfig) -> EmbeddingBagCollectionSharder:
    optim = config.optim
    params: dict[str, Any] = {}
    if optim.in_backward:
        params = {"optimizer": IN_BACKWARD[optim.name], "learning_rate": optim.lr, "eps": optim.eps}
        params["bounds_check_mode"] = BOUNDS_CHECKS[config.trainer.device]
    assert isinstance(config.model, DLRMConfig)
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
    if name == "adam":
        return optimizer_states.with_states(torch.optim.Adam(list(parameters), lr=lr, eps=eps))
    return torch.optim.Adagrad(list(parameters), lr=lr, eps=eps)
