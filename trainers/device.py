"""What training on a GPU and on a CPU do differently. Everything else asks nothing but where its tensors live.

take       which device this rank trains on
BACKENDS   the collective library of each
feed       batches on their way to the device
mark, milliseconds      the clock of a step's parts
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

from trainers.card import take_card
from trainers.config import TrainerConfig
from trainers.data.prefetch import Prefetch

# With a GPU, tensors on the CPU still go through gloo: predictions of an evaluation, checkpoints, barriers.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
BATCHES_AHEAD = 2

Mark = float | torch.cuda.Event


class Movable(Protocol):
    """A batch of any family."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...

    def pin_memory(self) -> Any: ...

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Its memory is in use by that stream too."""


B = TypeVar("B", bound=Movable)


def take(trainer: TrainerConfig) -> torch.device:
    """This rank's device, made current. ValueError where `trainer.device` asks for what is not there."""
    if trainer.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"trainer.device=cuda, but torch {torch.__version__} finds no GPU; allowed here: cpu")
    return take_card(int(os.environ.get("LOCAL_RANK", "0")), trainer.ranks_per_gpu)


def current(trainer: TrainerConfig) -> torch.device:
    """The device that `take` took."""
    return torch.device("cpu") if trainer.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def feed(batches: Iterator[B], device: torch.device) -> Iterator[B]:
    """The batches on `device`. To a GPU they are copied ahead of use from pinned memory, beside the compute."""
    return batches if device.type == "cpu" else _Copied(batches, device)


class _Copied(Generic[B]):
    """Copies in a thread and on a stream of its own."""

    def __init__(self, batches: Iterator[B], device: torch.device) -> None:
        self._device = device
        self._ahead = Prefetch(_copies(batches, device), BATCHES_AHEAD)

    def __iter__(self) -> _Copied[B]:
        return self

    def __next__(self) -> B:
        batch, copied = next(self._ahead)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        batch.record_stream(stream)
        return batch


def _copies(batches: Iterator[B], device: torch.device) -> Iterator[tuple[B, torch.cuda.Event]]:
    torch.cuda.set_device(device)  # of this thread
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        yield moved, copied


def mark(device: torch.device) -> Mark:
    """Now: on the host, or where the GPU's current stream has got to when it comes by."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Mark, end: Mark) -> float:
    """From mark to mark. On a GPU both have to lie behind; `reach` waits for that."""
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end)


def reach(end: Mark) -> None:
    """Wait until the device has passed that mark."""
    if isinstance(end, torch.cuda.Event):
        end.synchronize()


def describe_link(trainer: TrainerConfig, backend: str) -> str:
    """A label for people: what ranks reached each other through, given the operators' backend."""
    unfused = "baseline" in backend
    if trainer.device == "cpu":
        return "CPU host, gloo" if unfused else "CPU host, shared memory"
    cards = "same-GPU" if trainer.ranks_per_gpu > 1 else "GPUs"
    return f"{cards}, {'NCCL' if unfused else 'peer or pinned memory'}"
