"""On a CPU host: the fused operator's lookups packed by destination, `all_to_all` of the host backend, and a reorder."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fused_ops import exposed
from fused_ops.backends.host import all_to_all as host
from fused_ops.backends.host.embedding_native import GradientRuns, Lookups, embedding_gradients, embedding_update
from fused_ops.embedding_columns import received_sizes, reorder, sent_sizes
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.agreement import library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import host_channel

__all__ = ["embedding_all_to_all", "embedding_all_to_all_gradient", "embedding_gradients", "embedding_update"]


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`."""
    with _telling_peers(group, channel):
        optimizer.check(inputs)
        pooled = pooled_locally(inputs)
    layout, rank = inputs.layout, group.rank
    with exposed.whole():
        received = host.all_to_all(
            pooled.view(-1), received_sizes(layout, rank), sent_sizes(layout, rank), group, channel, layout.facts
        )
        return reorder(received, layout, rank)


@contextmanager
def _telling_peers(group: GroupContext, channel: int) -> Iterator[None]:
    """An input rejected here is a rejection of the exchange that the peers are about to wait in."""
    try:
        yield
    except ValueError:
        with host_channel(group, channel).agreement.call(OPERATOR):
            raise


def pooled_locally(inputs: EmbeddingInputs) -> Tensor:
    """The lookups alone, without an exchange: [B, D], the local features side by side."""
    lookups = Lookups(inputs)
    out = torch.empty(inputs.layout.global_batch, inputs.local_dim, dtype=inputs.dtype)
    library().fo_embedding_lookup_local(lookups.pointer, ctypes.c_void_p(out.data_ptr()))
    return out


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`."""
    with _telling_peers(group, channel):
        lookups = Lookups(inputs)
        inputs.check_gradient(grad)
    layout = inputs.layout
    grad = grad.contiguous()
    rank, facts = group.rank, ("gradient", f"average {average}", *layout.facts)
    with exposed.whole():
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
            packed, sent_sizes(layout, rank), received_sizes(layout, rank), group, channel, facts
        )
    order = torch.empty(inputs.indices.numel(), dtype=torch.int64)
    library().fo_embedding_sort(lookups.pointer, ctypes.c_void_p(order.data_ptr()))
    return received.view(layout.global_batch, inputs.local_dim), order
