"""A Transformer on the default process group: which ranks share a copy of it, and its first weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.parallel.tensor_parallel import TensorParallel
from models.transformer.huggingface import load_llama
from models.transformer.model import Transformer
from trainers.config import RunConfig
from trainers.engine import Replica
from trainers.transformer.architecture import architecture
from trainers.transformer.config import OPERATORS, TransformerModelConfig


@dataclass(frozen=True)
class Ranks:
    """tensor: the ranks that share this rank's copy (None: it has one of its own). data: the ranks that hold the same part
    of the other copies (None: there is one copy)."""

    replica: Replica
    mesh: DeviceMesh  # [data, tensor]
    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None


def split_ranks(device: torch.device, tensor_parallel: int | None) -> Ranks:
    """Neighbouring ranks share a copy. ValueError where the ranks do not divide into copies."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shared = tensor_parallel or world
    if world % shared:
        raise ValueError(f"engine.tensor_parallel={shared} does not divide {world} ranks")
    mesh = init_device_mesh(device.type, (world // shared, shared), mesh_dim_names=("data", "tensor"))
    replica = Replica(rank // shared, world // shared, tuple(range(0, world, shared)))
    return Ranks(
        replica,
        mesh,
        mesh.get_group("tensor") if shared > 1 else None,
        mesh.get_group("data") if replica.count > 1 else None,
    )


def build_transformer(config: RunConfig, ranks: Ranks, device: torch.device) -> Transformer:
    """The first weights depend on `trainer.seed`, or on `model.weights`, alone."""
    model = config.model
    assert isinstance(model, TransformerModelConfig)
    tp = TensorParallel(
        ranks.tensor,
        comm={operator: _comm(config, operator) for operator in OPERATORS},
        require_fused=config.comm.require_fused,
        sequence_parallel=config.engine.sequence_parallel,
        save_gathered=config.engine.save_gathered,
    )
    built = Transformer(architecture(model), tp, config.engine.checkpoint_activations).to(device)
    if model.weights is None:
        built.initialize(config.trainer.seed)
    else:
        load_llama(built, model.weights)
    return built


def _comm(config: RunConfig, operator: str) -> str:
    mode = getattr(config.comm, operator)
    return config.comm.backend if mode == "fused" and config.comm.backend != "auto" else mode
