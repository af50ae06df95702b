"""The fused backend's own kernels, one after the other: only this difference to it is the gain from fusing.

Lookups into a local buffer, then the exchange of their rows over the same symmetric memory, into the final layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.group import GroupContext


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`."""
    return _on_device(inputs).embedding_all_to_all(inputs, optimizer, group, channel)


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`."""
    return _on_device(inputs).embedding_all_to_all_gradient(grad, inputs, average, group, channel)


def embedding_update(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    optimizer: OptimizerInputs,
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.embedding_backward._update`."""
    return _on_device(inputs).embedding_update(grad, order, inputs, optimizer, weight_gradient, group, channel)


def embedding_gradients(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    wanted: Sequence[int],
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> list[Tensor]:
    """See `fused_ops.embedding_backward._gradients`."""
    return _on_device(inputs).embedding_gradients(grad, order, inputs, wanted, weight_gradient, group, channel)


def _on_device(inputs: EmbeddingInputs) -> ModuleType:
    side = "cuda" if inputs.indices.device.type == "cuda" else "host"
    return importlib.import_module(f"fused_ops.backends.unfused.embedding_{side}")
