"""Replicas of a Transformer kept equal by DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainers import optimizer_states
from trainers.config import RunConfig
from trainers.transformer.base import TransformerEngine
from trainers.transformer.optimizer import clip, make_optimizer


class DDPEngine(TransformerEngine):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._optimizer = make_optimizer(config.optim, self._parameters)
        self._module = self.model
        if self._ranks.data is not None:
            # DDP would cut a compiled graph into buckets, through the operators' effects.
            torch._dynamo.config.optimize_ddp = False
            self._module = DistributedDataParallel(
                self.model, process_group=self._ranks.data, gradient_as_bucket_view=True
            )

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        accumulates = not last and isinstance(self._module, DistributedDataParallel)
        with self._module.no_sync() if accumulates else nullcontext():
            loss.backward()

    def step(self) -> None:
        limit = self._config.optim.clip_norm
        if limit is not None:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            clip(gradients, self._split_names, self._ranks.tensor, limit)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def set_learning_rate(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.optim.lr * factor

    def model_state(self) -> dict[str, Any]:
        return self._split.wrap(self._parameters)

    def optimizer_state(self) -> dict[str, Any]:
        return self._split.wrap(optimizer_states.flat(self._optimizer, self._parameters))

    def loaded(self) -> None:
        """States are views into the memory that trains."""
