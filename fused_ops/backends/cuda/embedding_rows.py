"""Rows between the output's columns on the samples' ranks and packed rows on the tables' ranks, by stores into the receivers'
slots: the gradients' way back, and the exchange after lookups that are not fused with it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from fused_ops.backends.cuda.embedding_native import DTYPE_CODES, RowsParams, runs_in_columns
from fused_ops.embedding_columns import sample_starts
from fused_ops.embedding_inputs import EmbeddingInputs
from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.cuda_channel import CudaChannel

TILE_BYTES = 16 * 1024


def gradients_to_owners(grad: Tensor, inputs: EmbeddingInputs, average: bool, tag: int, lane: CudaChannel) -> Tensor:
    """Output gradient [b, total_dim] -> [B, D] on the table owners. Inside a call that has agreed on `tag`."""
    layout, rank, size = inputs.layout, inputs.rank, inputs.dtype.itemsize
    starts, sizes = sample_starts(layout), layout.batch_sizes
    widths = [layout.local_dim(r) * size for r in range(inputs.world)]
    lane.reserve(max(layout.global_batch * width for width in widths))
    received, call = lane.receive(tag, (layout.global_batch, inputs.local_dim), inputs.dtype)
    begin, columns, packed, run_widths = runs_in_columns(inputs)
    params = RowsParams(call=call, input=grad.data_ptr(), input_stride=layout.total_dim * size)
    params.divisor = inputs.world if average else 1
    params.call.heeds_halt = 1
    params.send_runs = _runs(lane, list(zip(columns, packed, run_widths, strict=True)))
    params.receive_runs = _runs(lane, [(0, 0, widths[rank])])
    for r in range(inputs.world):
        params.send_run[r], params.send_run_end[r], params.send_rows[r] = begin[r], begin[r + 1], sizes[rank]
        params.remote_row[r], params.remote_stride[r] = starts[rank], widths[r]
        params.receive_run_end[r], params.receive_row[r], params.receive_rows[r] = widths[rank] > 0, starts[r], sizes[r]
        params.send_tile_rows[r], params.receive_tile_rows[r] = _tile_rows(widths[r]), _tile_rows(widths[rank])
    _launch(params, inputs, lane, max(widths) * max(sizes))
    return received


def lookups_to_samples(pooled: Tensor, inputs: EmbeddingInputs, tag: int, lane: CudaChannel) -> Tensor:
    """Lookups [B, D] of the global batch -> [b, total_dim] on the samples' ranks. Inside a call that has agreed on `tag`."""
    layout, rank, size = inputs.layout, inputs.rank, inputs.dtype.itemsize
    starts, sizes = sample_starts(layout), layout.batch_sizes
    stride, widths = layout.total_dim * size, [layout.local_dim(r) * size for r in range(inputs.world)]
    lane.reserve(max(sizes) * stride)
    output, call = lane.receive(tag, inputs.output_shape, inputs.dtype)
    begin, columns, packed, run_widths = runs_in_columns(inputs)
    params = RowsParams(call=call, input=pooled.data_ptr(), input_stride=widths[rank], divisor=1)
    params.send_runs = params.receive_runs = _runs(lane, list(zip(packed, columns, run_widths, strict=True)))
    for r in range(inputs.world):
        params.send_run[r], params.send_run_end[r] = begin[rank], begin[rank + 1]
        params.input_row[r], params.send_rows[r], params.remote_stride[r] = starts[r], sizes[r], stride
        params.receive_run[r], params.receive_run_end[r], params.receive_rows[r] = begin[r], begin[r + 1], sizes[rank]
        params.send_tile_rows[r], params.receive_tile_rows[r] = _tile_rows(widths[rank]), _tile_rows(widths[r])
    _launch(params, inputs, lane, max(widths) * max(sizes))
    return output


def _launch(params: RowsParams, inputs: EmbeddingInputs, lane: CudaChannel, largest_pair_bytes: int) -> None:
    params.call.slices = lane.slices(largest_pair_bytes)
    tiles = sum(-(-params.send_rows[r] // params.send_tile_rows[r]) for r in range(inputs.world))
    blocks = num_blocks(tiles // lane.lib.fo_cuda_rows_warps() + 1, lane.sms)
    dtype = DTYPE_CODES[inputs.dtype]
    lane.launch_done(lane.lib.fo_cuda_rows(ctypes.byref(params), dtype, blocks, lane.stream_pointer()))


def _runs(lane: CudaChannel, runs: Sequence[tuple[int, int, int]]) -> int:
    flat = [number for run in runs for number in run]
    return lane.tables.address(("runs", *flat), lambda: (ctypes.c_int64 * len(flat))(*flat))


def _tile_rows(row_bytes: int) -> int:
    return max(1, TILE_BYTES // max(row_bytes, 1))
