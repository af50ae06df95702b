"""Embedding + All-to-All on CUDA: pooled rows go straight into the outputs of the ranks that own the samples."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fused_ops.backends.cuda.embedding_native import EmbeddingParams, Lookups, runs_in_columns
from fused_ops.backends.cuda.embedding_rows import gradients_to_owners
from fused_ops.backends.cuda.embedding_update import (
    embedding_gradients,
    embedding_update,
    load_kernels,
    sort_lookups,
)
from fused_ops.embedding_columns import sample_starts
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.cuda_channel import cuda_channel
from fused_ops.symmetric.cuda_memory import check_cuda
from fused_ops.symmetric.group import GroupContext

__all__ = ["embedding_all_to_all", "embedding_all_to_all_gradient", "embedding_gradients", "embedding_update"]

COPY_TILE_BYTES = 16 * 1024
# The share of the warps that do this rank's own samples first. On a link slower than the lookups, stores to remote ones keep the
# link busy and would else keep every warp waiting. On a fast link remote samples come first for all.
LOCAL_FIRST_SHARE = {"peer": 0.0, "pinned": 0.5}


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`. Every source stores its own columns of the receiver's whole output."""
    device = inputs.indices.device
    lane = cuda_channel(group, channel, device)
    load_kernels(lane.device.index)
    with torch.cuda.device(device), lane.call(OPERATOR):
        lookups = Lookups(inputs, lane)
        optimizer.check(inputs)
        layout, size = inputs.layout, inputs.dtype.itemsize
        tag, _ = lane.agreement.agree((OPERATOR, *layout.facts))
        stride = layout.total_dim * size
        lane.reserve(max(layout.batch_sizes) * stride)
        output, call = lane.receive(tag, inputs.output_shape, inputs.dtype)
        begin, columns, _, widths = runs_in_columns(inputs)
        runs = ("columns", *columns, *widths)
        address = lane.tables.address(runs, lambda: (ctypes.c_int64 * (2 * len(columns)))(*columns, *widths))
        params = EmbeddingParams(
            call=call,
            lookups=lookups.struct,
            run_column=address,
            run_width=address + 8 * len(columns),
            output_stride=stride,
            copy_rows=max(1, COPY_TILE_BYTES // max(1, stride // group.world)),
        )
        params.sample_begin[: group.world + 1] = sample_starts(layout)
        params.run_begin[: group.world + 1] = begin
        widest = max(layout.local_dim(r) for r in range(group.world))
        params.call.slices = lane.slices(max(layout.batch_sizes) * widest * size)
        params.call.local_first_warps = int(LOCAL_FIRST_SHARE[lane.link] * lane.lib.fo_cuda_embedding_warps())
        code = lane.lib.fo_cuda_embedding_all_to_all(
            ctypes.byref(params),
            lookups.dtype,
            lookups.index_bytes,
            _blocks(lookups),
            lane.stream_pointer(),
        )
        lane.launch_done(code)
        return output


def _blocks(lookups: Lookups) -> int:
    lane, struct = lookups.lane, lookups.struct
    tiles = struct.num_features * -(-struct.batch // struct.bags)
    return num_blocks(tiles // lane.lib.fo_cuda_embedding_warps() + 1, lane.sms)


def pooled_locally(inputs: EmbeddingInputs, group: GroupContext, channel: int = 0) -> Tensor:
    """The lookups alone, without an exchange: [B, D], the local features side by side. A bad value is raised by the channel's
    next exchange."""
    device = inputs.indices.device
    lane = cuda_channel(group, channel, device)
    with torch.cuda.device(device):
        lookups = Lookups(inputs, lane)
        out = torch.empty(inputs.layout.global_batch, inputs.local_dim, dtype=inputs.dtype, device=device)
        code = lane.lib.fo_cuda_embedding_lookup(
            lookups.pointer,
            lookups.dtype,
            lookups.index_bytes,
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(inputs.local_dim * inputs.dtype.itemsize),
            ctypes.c_void_p(lane.state_address),
            group.rank,
            lane.stream_pointer(),
        )
        check_cuda(lane.lib, code, "the lookups")
        return out


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`. The lookups are sorted, on a stream beside, while gradients travel."""
    lane = cuda_channel(group, channel, grad.device)
    with torch.cuda.device(grad.device), lane.call(f"{OPERATOR} backward"):
        lookups = Lookups(inputs, lane)
        inputs.check_gradient(grad)
        facts = (f"{OPERATOR} backward", "averaged" if average else "summed", *inputs.layout.facts)
        tag, _ = lane.agreement.agree(facts)
        grad = grad.contiguous()
        current, side = torch.cuda.current_stream(), lane.side_stream
        order = torch.empty(inputs.indices.numel(), dtype=torch.int64, device=grad.device)
        side.wait_stream(current)
        sorting = sort_lookups(lookups, order, side)
        try:
            return gradients_to_owners(grad, inputs, average, tag, lane), order
        finally:
            current.wait_stream(side)
            del sorting  # after the join: its memory may be used again by this stream
