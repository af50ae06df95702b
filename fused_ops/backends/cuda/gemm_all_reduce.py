"""GEMM + AllReduce of a few rows on CUDA: a product at the speed of the weight's memory, whose partial sums leave in packets.

Direct two-phase (each rank adds up one part of the columns and hands its sums to all), or one phase where the output is small
(everybody's partial sums go to everybody). Sums are in rank order either way. Within a rank, the order in which k is added up
depends on how many SMs the channel may fill.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.backends.cuda.embedding_native import DTYPE_CODES
from fused_ops.backends.cuda.gemv_shape import ANY_STRIDES, BY_COLUMNS, BY_ROWS, MOST_ROWS, TileShape, shape_of
from fused_ops.gemm_all_reduce import OPERATOR
from fused_ops.gemm_inputs import GemmInputs, split_evenly, starts
from fused_ops.launch_geometry import num_blocks
from fused_ops.symmetric.cuda_channel import NO_PLACE, CallParams, CudaChannel, cuda_channel
from fused_ops.symmetric.cuda_memory import MAX_RANKS, check_cuda, check_structs, library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.packet_memory import Packets, packet_memory

PACKET_BYTES, PACKET_DATA = 16, 12
MOST_BLOCKS = 512  # kMostBlocks of native/cuda_packets.cuh
# Of packets that a rank stores into its peers: below, the second phase's wait would take longer than what it saves.
ONE_PHASE_BYTES = {"peer": 512 << 10, "pinned": 64 << 10}


class GemmParams(ctypes.Structure):
    """`GemmParams` of gemm_all_reduce.cu."""

    _fields_ = [
        ("call", CallParams),
        ("packets", ctypes.c_void_p * MAX_RANKS),
        ("half_bytes", ctypes.c_int64),
        ("sums_offset", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("span", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("least", ctypes.c_int64),
        ("longer", ctypes.c_int64),
        ("shape", TileShape),
        ("rows", ctypes.c_int32),
        ("one_phase", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("first_tile", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("partials", ctypes.c_int32),
        ("sums", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Plan:
    """What follows from facts that all ranks share: where packets lie."""

    facts: tuple[str, ...]
    one_phase: bool
    span: int
    first: int
    size: int
    partials: int
    sums: int
    sums_offset: int
    bytes: int


@functools.lru_cache(maxsize=1024)
def plan(rows: int, columns: int, dtype: torch.dtype, has_bias: bool, rank: int, world: int, link: str) -> Plan:
    facts = (OPERATOR, str(dtype), f"{rows} rows", f"{columns} columns", "with a bias" if has_bias else "no bias")
    partials, sums = -(-rows * 4 // PACKET_DATA), -(-rows * dtype.itemsize // PACKET_DATA)
    one_phase = (world - 1) * columns * partials * PACKET_BYTES <= ONE_PHASE_BYTES[link]
    sizes = split_evenly(columns, world)
    span = columns if one_phase else sizes[0]
    sums_offset = world * partials * span * PACKET_BYTES
    return Plan(
        facts,
        one_phase,
        span,
        0 if one_phase else starts(sizes)[rank],
        columns if one_phase else sizes[rank],
        partials,
        sums,
        sums_offset,
        sums_offset + (0 if one_phase else sums * columns * PACKET_BYTES),
    )


def takes(rows: int) -> bool:
    """Whether these kernels are made for so many rows of input; above that the product is a GEMM, and another backend's."""
    return rows <= MOST_ROWS


def gemm_all_reduce(input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int) -> Tensor:
    """See `fused_ops.gemm_all_reduce`. At most `MOST_ROWS` rows."""
    lane = cuda_channel(group, channel, input.device)
    with torch.cuda.device(input.device), lane.call(OPERATOR):
        load_kernels(input.device.index)
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias, leading=True)
        if not takes(gemm.rows):
            raise ValueError(f"{OPERATOR}: the cuda backend takes up to {MOST_ROWS} rows of input, got {gemm.rows}")
        planned = plan(gemm.rows, gemm.columns, gemm.dtype, bias is not None, lane.rank, lane.world, lane.link)
        tag, _ = lane.agreement.agree(planned.facts)
        output = torch.empty(*input.shape[:-1], gemm.columns, dtype=gemm.dtype, device=input.device)
        if output.numel():
            packets = packet_memory(lane, planned.bytes)
            lane.reserve(1)  # nothing arrives in a slot, but a graph's hold on the channel is by its slots
            _, call = lane.receive(tag, (0,), gemm.dtype)
            call.output, call.output_bytes = output.data_ptr(), output.numel() * output.element_size()
            call.next_place = NO_PLACE
            _launch(lane, call, gemm, None if bias is None else bias.contiguous(), planned, packets)
    return output


def _launch(
    lane: CudaChannel, call: CallParams, gemm: GemmInputs, bias: Tensor | None, planned: Plan, packets: Packets
) -> None:
    source, weight = gemm.input.contiguous(), gemm.weight
    dtype, size, inner = DTYPE_CODES[gemm.dtype], gemm.dtype.itemsize, source.shape[1]
    layout = layout_of(weight)
    shape = shape_of(
        lane.lib, dtype, layout, gemm.rows, gemm.columns, inner, num_blocks(gemm.columns, min(lane.sms, MOST_BLOCKS))
    )
    least, longer = divmod(gemm.columns, lane.world)
    after = (lane.rank + 1) % lane.world  # a rank's own columns last
    first_remote = 0 if planned.one_phase else after * least + min(after, longer)
    params = GemmParams(
        call=call,
        half_bytes=packets.half_bytes,
        sums_offset=planned.sums_offset,
        input=source.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        weight=weight.data_ptr(),
        row_stride=weight.stride(0) * size,
        column_stride=weight.stride(1) * size,
        inner=inner,
        columns=gemm.columns,
        span=planned.span,
        first=planned.first,
        size=planned.size,
        least=least,
        longer=longer,
        shape=shape.tile,
        rows=gemm.rows,
        one_phase=int(planned.one_phase),
        tiles=shape.tiles,
        first_tile=min(first_remote // shape.tile.rows, shape.tiles - 1),
        units=shape.blocks,
        partials=planned.partials,
        sums=planned.sums,
    )
    params.packets[: lane.world] = packets.addresses
    code = lane.lib.fo_cuda_gemm_all_reduce(
        ctypes.byref(params), dtype, layout, shape.blocks, shape.threads, shape.shared_bytes, lane.stream_pointer()
    )
    lane.launch_done(code)


def layout_of(weight: Tensor) -> int:
    """How the kernels may read it: 16 bytes at a time along k, or along n, or one element at a time."""
    size, (rows, inner) = weight.element_size(), weight.shape

    def whole(count: int) -> bool:
        return count * size % 16 == 0

    aligned = weight.data_ptr() % 16 == 0
    if aligned and weight.stride(1) == 1 and whole(inner) and (whole(weight.stride(0)) or rows == 1):
        return BY_ROWS
    if aligned and weight.stride(0) == 1 and rows % 8 == 0 and (whole(weight.stride(1)) or inner == 1):
        return BY_COLUMNS
    return ANY_STRIDES


@functools.cache
def load_kernels(device_index: int) -> None:
    """Before any kernel waits for a peer: a lazy load would wait behind it."""
    lib = library(device_index)
    check_structs(lib, {"gemm_params": GemmParams})
    check_cuda(lib, lib.fo_cuda_gemm_all_reduce_load(), "loading the kernels")
