"""The same lookups and the same shared-memory All-to-All, one after the other: only this difference is the gain from fusing.

Lookups into a local buffer, packed by destination; `all_to_all` of the host backend; a reorder into the final layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fused_ops.backends.host import all_to_all as host
from fused_ops.backends.host.embedding_native import GradientRuns, Lookups, embedding_gradients, embedding_update
from fused_ops.embedding_columns import reorder
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.agreement import library
from fused_ops.symmetric.group import GroupContext

__all__ = ["embedding_all_to_all", "embedding_all_to_all_gradient", "embedding_gradients", "embedding_update"]


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`."""
    optimizer.check(inputs.tables)
    layout = inputs.layout
    received = host.all_to_all(
        pooled_locally(inputs).view(-1),
        [inputs.local_batch * layout.local_dim(r) for r in range(group.world)],
        [size * inputs.local_dim for size in layout.batch_sizes],
        group,
        channel,
    )
    return reorder(received, layout, group.rank)


def pooled_locally(inputs: EmbeddingInputs) -> Tensor:
    """The lookups alone, without an exchange: [B, D], the local features side by side."""
    lookups = Lookups(inputs)
    out = torch.empty(inputs.layout.global_batch, inputs.local_dim, dtype=inputs.dtype)
    library().fo_embedding_lookup_local(lookups.pointer, ctypes.c_void_p(out.data_ptr()))
    return out


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_all_to_all._gradient`."""
    lookups = Lookups(inputs)
    inputs.check_gradient(grad)
    layout = inputs.layout
    grad = grad.contiguous()
    packed = torch.empty(grad.numel(), dtype=grad.dtype)
    library().fo_embedding_pack(
        lookups.pointer,
        group.world,
        ctypes.c_void_p(grad.data_ptr()),
        ctypes.c_int64(inputs.local_batch),
        ctypes.c_int64(layout.total_dim),
        *GradientRuns(inputs).arguments,
        ctypes.c_float(group.world if average else 1),
        ctypes.c_void_p(packed.data_ptr()),
    )
    received = host.all_to_all(
        packed,
        [size * inputs.local_dim for size in layout.batch_sizes],
        [inputs.local_batch * layout.local_dim(r) for r in range(group.world)],
        group,
        channel,
    )
    order = torch.empty(inputs.indices.numel(), dtype=torch.int64)
    library().fo_embedding_sort(lookups.pointer, ctypes.c_void_p(order.data_ptr()))
    return received.view(layout.global_batch, inputs.local_dim), order
