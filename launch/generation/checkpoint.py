"""A training run's checkpoint, read for its model alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from models.parallel.shards import parameter_shards
from models.transformer.config import RotaryScaling, TransformerConfig
from models.transformer.model import Transformer
from trainers import checkpoint
from trainers.config import ConfigError

PREFIX = "model."  # of the architecture's keys in meta.json


def checkpoint_of(path: str) -> Path:
    """That checkpoint, or a run directory's newest. ConfigError where there is none."""
    try:
        found = checkpoint.find(path, path)
    except checkpoint.CheckpointError as error:
        raise ConfigError(
            f"weights=run:{path}: no complete checkpoint there (a checkpoint or a run directory)"
        ) from error
    assert found is not None  # only "auto" may find none
    return found


def saved_architecture(path: str) -> TransformerConfig:
    """ConfigError where what is saved there is no Transformer."""
    saved = json.loads((checkpoint_of(path) / "meta.json").read_text())["architecture"]
    values: dict[str, Any] = {key.removeprefix(PREFIX): value for key, value in saved.items() if key.startswith(PREFIX)}
    if "heads" not in values:
        raise ConfigError(f"weights=run:{path}: the model there is no Transformer")
    if values["rope_scaling"] is not None:
        values["rope_scaling"] = RotaryScaling(**values["rope_scaling"])
    return TransformerConfig(**values)


@torch.no_grad()
def load_weights(model: Transformer, path: str) -> None:
    """One whole parameter at a time, of which each rank keeps its part, so any number of ranks may have written it."""
    folder, shards = checkpoint_of(path), parameter_shards(model)
    saved: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, parameter in model.named_parameters():
        shard = shards.get(name)
        shape = parameter.shape if shard is None else shard.full_shape(parameter.shape)
        if name not in saved or saved[name].size != shape:
            raise ConfigError(f"{folder} has no {name} of shape {list(shape)}")
        whole = torch.empty(shape, dtype=saved[name].properties.dtype)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it says that this rank reads for itself
            dcp.load({name: whole}, checkpoint_id=folder, no_dist=True)
        parameter.copy_(whole if shard is None else shard.of(whole))
