"""What the engines of a Transformer share; they differ in how replicas add up their gradients and update."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fused_ops
from models.parallel.shards import parameter_shards
from trainers import device
from trainers.config import RunConfig
from trainers.data.text.batch import TextBatch
from trainers.step_timing import StepTimer
from trainers.transformer.architecture import architecture
from trainers.transformer.build import build_transformer, split_ranks
from trainers.transformer.config import TextConfig, TransformerModelConfig
from trainers.transformer.evaluation import TextEvaluation
from trainers.transformer.feed import TextFeed, TextWork
from trainers.transformer.sharded_state import SplitState
from trainers.transformer.throughput import peak_flops, training_flops_per_token


class TransformerEngine:
    """A Transformer on the default process group. A subclass sets `_module`, which is called, and updates it.

    Parameter names and whole shapes are the same for every engine, `comm` and number of ranks.
    """

    _module: Any

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.model, TransformerModelConfig)
        assert isinstance(config.data, TextConfig)
        self._config, self._data = config, config.data
        self._architecture = architecture(config.model)
        self.device = device.current(config.trainer)
        self._ranks = split_ranks(self.device, config.engine.tensor_parallel)
        self.replica = self._ranks.replica
        self.model: nn.Module = build_transformer(config, self._ranks, self.device)
        self._parameters = dict(self.model.named_parameters())
        shards = parameter_shards(self.model)
        self._split = SplitState(shards, self._ranks.tensor)
        self._split_names = set(shards) if self._ranks.tensor is not None else set()
        if config.trainer.compile:
            self.model.compile(backend=config.trainer.compile_backend)

    def feed(self, batches: Iterator[TextBatch], timer: StepTimer) -> TextFeed:
        return TextFeed(batches, self._data.length, self._ranks.data, self.device, timer)

    def loss(self, work: TextWork) -> torch.Tensor:
        batch = work.batch
        enabled = self._config.trainer.dense_dtype == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            losses = self._module(batch.tokens, batch.targets, positions=batch.positions, documents=batch.documents)
        return losses.sum()

    def check(self, work: TextWork) -> None:
        """Tokens were checked where they were read."""
        fused_ops.check_errors()

    def evaluation(self) -> TextEvaluation:
        return TextEvaluation(self.loss, self.replica, self.device)

    def throughput(self, total: int, samples: int, seconds: float) -> dict[str, float | None]:
        peak = peak_flops(self.device)
        cards = dist.get_world_size() / self._config.trainer.ranks_per_gpu
        flops = training_flops_per_token(self._architecture, self._data.length) * total / seconds
        mfu = None if peak is None else flops / (peak * cards)
        return {"samples_per_s": samples / seconds, "tokens_per_s": total / seconds, "mfu": mfu}

    def describe(self) -> dict[str, Any]:
        values = {f"model.{key}": value for key, value in asdict(self._architecture).items()}
        return values | {"optim.name": self._config.optim.name}

    def exchanges(self) -> Iterable[nn.Module]:
        return []

    def close(self) -> None:
        # DDP's reducer holds the group; left to interpreter exit it ends it with a crash.
        self.__dict__.clear()
        gc.collect()
