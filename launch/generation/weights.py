"""The model that generates: its architecture, its weights, each rank its own part."""

from __future__ import annotations

import zlib

import torch

from launch.generation.checkpoint import load_weights, saved_architecture
from launch.generation.config import GenerateConfig
from models.parallel.shards import parameter_shards
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.huggingface import llama_config, load_llama
from models.transformer.model import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def architecture_of(config: GenerateConfig) -> TransformerConfig | None:
    """What the weights bring along; None where they are drawn, for any model. ValueError where they are of no such model."""
    kind, path = config.source()
    if kind == "hf":
        return llama_config(path)
    return saved_architecture(path) if kind == "run" else None


def build(
    config: GenerateConfig, architecture: TransformerConfig, tp: TensorParallel, device: torch.device
) -> Transformer:
    """On `device` and in `config.dtype` from the start: the whole model may fit nowhere else."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[config.dtype])
    try:
        with device:
            model = Transformer(architecture, tp)
    finally:
        torch.set_default_dtype(before)
    kind, path = config.source()
    if kind == "random":
        model.initialize(config.seed)
    elif kind == "noise":
        _fill_with_noise(model, config.seed)
    elif kind == "hf":
        load_llama(model, path)
    else:
        load_weights(model, path)
    return model.eval()


@torch.no_grad()
def _fill_with_noise(model: Transformer, seed: int) -> None:
    """Normal numbers of the right size, drawn on the device. A split parameter's parts differ, a replicated one's do not."""
    split = parameter_shards(model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1)
        else:
            rank = model.tp.rank if name in split else 0
            mixed = zlib.crc32(f"{seed} {name} {rank}".encode())
            generator = torch.Generator(parameter.device).manual_seed(mixed)
            parameter.normal_(0, model.config.init_std, generator=generator)
