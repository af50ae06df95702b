"""Which part of a whole parameter a rank holds, in one place for initialisation, loading and checkpoints.

A module with split parameters has `shards`, its own parameters' names to `Shard`; a parameter that is not named there is
replicated. `parameter_shards(model)` collects them under full names, which are the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def even_split(size: int, world: int, rank: int) -> tuple[int, int]:
    """(start, stop) of `rank`'s part: as even as whole units allow, the first `size % world` ranks have one more."""
    each, left = divmod(size, world)
    start = rank * each + min(rank, left)
    return start, start + each + (rank < left)


@dataclass(frozen=True)
class Shard:
    """This rank holds [start, stop) of `full_size` along `dim` of the whole parameter."""

    dim: int
    full_size: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def full_shape(self, local: torch.Size) -> torch.Size:
        return torch.Size([*local[: self.dim], self.full_size, *local[self.dim + 1 :]])

    def of(self, full: Tensor) -> Tensor:
        """A view of this rank's part of `full`."""
        return full.narrow(self.dim, self.start, self.size)


def parameter_shards(model: nn.Module) -> dict[str, Shard]:
    """Full parameter name -> shard, for every split parameter of `model`."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }


def full_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Full parameter name -> shape of the whole parameter, the same for every number of ranks."""
    shards = parameter_shards(model)
    return {
        name: shards[name].full_shape(parameter.shape) if name in shards else parameter.shape
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def load_full(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of every whole parameter into `model`. ValueError for a missing name or a wrong shape."""
    shards, shapes = parameter_shards(model), full_shapes(model)
    missing, unknown = sorted(shapes.keys() - full.keys()), sorted(full.keys() - shapes.keys())
    if missing or unknown:
        raise ValueError(f"parameters do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, shape in shapes.items():
        if full[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(full[name].shape)}, the model needs {tuple(shape)}")
    for name, parameter in model.named_parameters():
        parameter.copy_(shards[name].of(full[name]) if name in shards else full[name])
