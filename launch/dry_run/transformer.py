"""A Transformer's parameter count, split and bytes a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.model import Transformer
from trainers.config import ConfigError, RunConfig
from trainers.transformer.architecture import architecture
from trainers.transformer.config import TransformerModelConfig

MIB = 1 << 20
STATES = {"sgd": 0, "adam": 2, "adamw": 2}  # fp32 numbers that the optimizer keeps of each parameter


def report(config: RunConfig, world: int, console: Console) -> None:
    assert isinstance(config.model, TransformerModelConfig)
    shape = architecture(config.model)
    shared = config.engine.tensor_parallel or world
    if world % shared:
        raise ConfigError(f"engine.tensor_parallel={shared} does not divide {world} ranks")
    if shape.num_kv_heads < shared:
        raise ConfigError(f"model {config.model.name} has {shape.num_kv_heads} KV heads, too few for {shared} ranks")
    replicas = world // shared
    whole, padded = shape.parameter_count(), shape.parameter_count(padding=True)
    console.print(f"parameters: {whole:,} ({padded - whole:,} more rows pad the vocabulary)")
    console.print(f"split: {replicas} replica(s) x {shared} tensor-parallel rank(s), engine {config.engine.kind}")

    sizes = Table("tensor-parallel rank", "parameters", "weights", "gradients", "optimizer", "total MiB")
    sizes.title = "bytes a rank (activations not counted)"
    zero = config.engine.zero_stage if config.engine.kind == "deepspeed" else 0
    for rank, count in enumerate(_local_parameters(shape, shared)):
        weights = gradients = 4 * count
        states = 4 * count * STATES[config.optim.name]
        if zero:
            states = -(-(states + (4 * count if config.trainer.dense_dtype == "bf16" else 0)) // replicas)
        if zero == 2:
            gradients = -(-gradients // replicas)
        total = weights + gradients + states
        row = (str(rank), f"{count:,}", f"{weights:,}", f"{gradients:,}", f"{states:,}", f"{total / MIB:,.1f}")
        sizes.add_row(*row)
    console.print(sizes)


@dataclass(frozen=True)
class _OneOf(TensorParallel):
    """What a rank would be, without its process group."""

    of: int = 1
    number: int = 0

    @property
    def world(self) -> int:
        return self.of

    @property
    def rank(self) -> int:
        return self.number


def _local_parameters(shape: TransformerConfig, world: int) -> list[int]:
    """Parameters that each tensor-parallel rank holds."""
    with torch.device("meta"):
        models = [Transformer(shape, _OneOf(of=world, number=rank)) for rank in range(world)]
    return [sum(p.numel() for p in model.parameters()) for model in models]
