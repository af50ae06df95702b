"""What the loop asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from models.dlrm.index_distribution import DistributedIndices, IndexDistribution


class Engine(Protocol):
    device: torch.device
    model: nn.Module
    indices: IndexDistribution

    def forward(self, dense: torch.Tensor, indices: DistributedIndices) -> torch.Tensor:
        """Logits [b] in fp32 of this rank's b samples."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Gradients of `loss`, averaged over ranks. `last`: the optimizer steps next; before that they accumulate."""

    def step(self) -> None:
        """Clip where asked, update, clear the gradients."""

    def check(self, indices: DistributedIndices) -> None:
        """Raise what the device has refused in a step that is over, where it could not at the call. ValueError names an
        index outside its table. Waits for the device."""

    def set_learning_rate(self, factor: float) -> None:
        """`factor` times the configured learning rates, for the next forward and backward on."""

    def model_state(self) -> dict[str, Any]:
        """Weights: tables as ShardedTensors, the rest the same on every rank. What is written into them counts."""

    def optimizer_state(self) -> dict[str, Any]:
        """Optimizer states, flat; a table's are sharded as the table is. What is written into them counts."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must agree on before it is loaded; plain containers."""

    def exchanges(self) -> Iterable[nn.Module]:
        """Modules that start a pooled exchange and return an awaitable, for `step_timing`; none where it is fused."""

    def close(self) -> None:
        """Let go of everything that holds on to the process group."""
