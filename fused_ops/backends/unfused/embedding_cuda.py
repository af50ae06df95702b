"""On CUDA: the fused operator's lookups into a local buffer, then its rows from there to the samples' ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.backends.cuda.embedding_all_to_all import (
    embedding_all_to_all_gradient,
    embedding_gradients,
    embedding_update,
    pooled_locally,
)
from fused_ops.backends.cuda.embedding_rows import lookups_to_samples
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.cuda_channel import cuda_channel
from fused_ops.symmetric.group import GroupContext

# Backward fuses nothing but the sort beside the exchange: there is no other version of it.
__all__ = ["embedding_all_to_all", "embedding_all_to_all_gradient", "embedding_gradients", "embedding_update"]


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`. The exchange stores into the final columns, so no reorder follows."""
    device = inputs.indices.device
    lane = cuda_channel(group, channel, device)
    with torch.cuda.device(device), lane.call(OPERATOR):
        optimizer.check(inputs)
        inputs.check()
        tag, _ = lane.agreement.agree((f"{OPERATOR} unfused", *inputs.layout.facts))
        return lookups_to_samples(pooled_locally(inputs, group, channel), inputs, tag, lane)
