"""A split Transformer beside the unsplit one in float64."""

import torch
from torch import Tensor

from models.parallel.shards import load_full, parameter_shards
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.model import Transformer
from tests.models.close import assert_same_on_all_ranks


def unsplit(config: TransformerConfig, seed: int = 1) -> Transformer:
    """In float64, biases and norms moved off zero and one so that they count."""
    model = Transformer(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.double()


def split(reference: Transformer, tp: TensorParallel, **options: bool) -> Transformer:
    model = Transformer(reference.config, tp, **options)
    load_full(model, {name: p.detach() for name, p in reference.named_parameters()})
    return model


def gradients(reference: Transformer, losses: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(losses.sum(), list(reference.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(reference.named_parameters(), found, strict=True)
    }


def check_gradients(model: Transformer, want: dict[str, Tensor]) -> None:
    shards = parameter_shards(model)
    # In units of the largest gradient: that of a key's bias, say, is zero but for rounding.
    largest = max(float(g.abs().max()) for g in want.values())
    for name, parameter in model.named_parameters():
        expected = shards[name].of(want[name]) if name in shards else want[name]
        assert parameter.grad is not None, name
        error = float((parameter.grad.double() - expected).abs().max()) if expected.numel() else 0.0
        assert error <= 1e-5 * largest, f"{name}: off by {error:.3g}, the largest gradient is {largest:.3g}"
        if name not in shards:
            assert_same_on_all_ranks(parameter.grad, name, model.tp.group)
