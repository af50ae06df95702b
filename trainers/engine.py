"""What the loop asks of an engine: a model, spread over ranks in one way, with its batches, loss and evaluation.

A family (`trainers.families`) has an engine for each `engine.kind` that suits it; the loop sees these protocols alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainers.step_timing import StepTimer


@dataclass(frozen=True)
class Replica:
    """Which copy of the model this rank works on. Ranks of one copy take the same samples and have the same loss.

    rank, count: of copies. leaders: a rank of each copy, in order; their losses add up to the step's.
    """

    rank: int
    count: int
    leaders: tuple[int, ...]


class Work(Protocol):
    """This replica's part of a global batch, ready for `Engine.loss`."""

    @property
    def total(self) -> int:
        """What the loss is a mean over, of all replicas: samples, or tokens. 0: no replica has any left."""

    @property
    def samples(self) -> int:
        """Samples of all replicas."""

    def tensors(self) -> Mapping[str, Any]:
        """What to keep of it where the loss is not finite."""


class Feed(Protocol):
    """Runs one batch ahead. Every rank calls the three in the same order and equally often.

    fetch()   load the next batch; what others need of it first leaves
    send()    the rest of it leaves
    take()    the batch that was fetched; once a replica is out of samples, empty work for ever
    """

    def fetch(self) -> None: ...

    def send(self) -> None: ...

    def take(self) -> Any: ...


class Evaluation(Protocol):
    """One evaluation, from its batches to its record."""

    def add(self, work: Any) -> None:
        """Runs the model on it."""

    def event(self, step: int) -> dict[str, Any] | None:
        """The `eval` record, on rank 0 at least. Every rank calls it."""


class Engine(Protocol):
    device: torch.device
    model: nn.Module
    replica: Replica

    def feed(self, batches: Iterator[Any], timer: StepTimer) -> Feed:
        """Of this replica's batches."""

    def loss(self, work: Any) -> torch.Tensor:
        """The summed loss of this replica's samples (or tokens), a scalar in fp32."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Gradients of `loss`, averaged over replicas. `last`: the optimizer steps next; before that they accumulate."""

    def step(self) -> None:
        """Clip where asked, update, clear the gradients."""

    def check(self, work: Any) -> None:
        """Raise what the device has refused in a step that is over, where it could not at the call. ValueError names what
        is outside its table. Waits for the device."""

    def set_learning_rate(self, factor: float) -> None:
        """`factor` times the configured learning rates, for the next forward and backward on."""

    def evaluation(self) -> Evaluation: ...

    def throughput(self, total: int, samples: int, seconds: float) -> dict[str, float | None]:
        """Of a step: samples_per_s, and what else the family counts."""

    def model_state(self) -> dict[str, Any]:
        """Weights: those that are split as ShardedTensors, the rest the same on every rank. What is written into them
        counts once `loaded` is called."""

    def optimizer_state(self) -> dict[str, Any]:
        """Optimizer states, flat; those of a split parameter are split as it is. As above."""

    def loaded(self) -> None:
        """The states were filled from a checkpoint."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must agree on before it is loaded; plain containers."""

    def exchanges(self) -> Iterable[nn.Module]:
        """Modules that start a pooled exchange and return an awaitable, for `step_timing`; none where it is fused."""

    def close(self) -> None:
        """Let go of everything that holds on to the process group."""
