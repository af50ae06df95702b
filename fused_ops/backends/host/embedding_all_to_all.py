"""Embedding + All-to-All on a CPU host: pooled rows go straight into the outputs of the ranks that own the samples."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fused_ops.backends.host.embedding_native import GradientRuns, Lookups, embedding_gradients, embedding_update
from fused_ops.embedding_columns import sample_starts
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.agreement import Result, int64_array, library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import Incoming, host_channel

__all__ = ["embedding_all_to_all", "embedding_all_to_all_gradient", "embedding_gradients", "embedding_update"]


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`. Every source stores its own columns of the receiver's whole output."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        lookups = Lookups(inputs)
        optimizer.check(inputs)
        layout = inputs.layout
        tag, _ = lane.agreement.agree((OPERATOR, *layout.facts))
        output_bytes = inputs.local_batch * layout.total_dim * inputs.dtype.itemsize
        incoming = Incoming.strided([0] * group.world, output_bytes)
        with lane.receive(tag, incoming) as receipt:
            result = Result()
            library().fo_embedding_all_to_all(
                lane.handle,
                ctypes.c_int64(call),
                ctypes.c_uint32(tag),
                lookups.pointer,
                int64_array(inputs.columns),
                int64_array(sample_starts(layout)),
                ctypes.c_int64(layout.total_dim),
                ctypes.c_void_p(receipt.address),
                ctypes.byref(result),
            )
            lane.finish(result)
            return receipt.tensor(inputs.output_shape, inputs.dtype)


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`. The lookups are sorted while the peers' slices are on their way."""
    lane = host_channel(group, channel)
    with lane.agreement.call(f"{OPERATOR} backward") as call:
        lookups = Lookups(inputs)
        inputs.check_gradient(grad)
        layout = inputs.layout
        tag, _ = lane.agreement.agree((f"{OPERATOR} backward", "averaged" if average else "summed", *layout.facts))
        row_bytes = inputs.local_dim * inputs.dtype.itemsize
        incoming = Incoming.packed([size * row_bytes for size in layout.batch_sizes])
        order = torch.empty(inputs.indices.numel(), dtype=torch.int64)
        grad = grad.contiguous()
        with lane.receive(tag, incoming) as receipt:
            result = Result()
            library().fo_embedding_gradient(
                lane.handle,
                ctypes.c_int64(call),
                ctypes.c_uint32(tag),
                lookups.pointer,
                ctypes.c_void_p(grad.data_ptr()),
                ctypes.c_int64(inputs.local_batch),
                ctypes.c_int64(layout.total_dim),
                *GradientRuns(inputs).arguments,
                ctypes.c_float(group.world if average else 1),
                ctypes.c_void_p(receipt.address + incoming.offsets[group.rank]),
                ctypes.c_void_p(order.data_ptr()),
                ctypes.byref(result),
            )
            lane.finish(result)
            return receipt.tensor((layout.global_batch, inputs.local_dim), inputs.dtype), order
