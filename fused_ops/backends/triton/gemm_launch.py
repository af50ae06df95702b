"""Calls of the GEMM operators as the host makes them: what their kernels take of the channel, and the end of a call."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_ops.backends.triton.finish import SUPPRESSED, finish_kernel, poison
from fused_ops.backends.triton.gemm_operands import Operand
from fused_ops.backends.triton.gemm_tiles import TileShape
from fused_ops.backends.triton.launch import LANES, NUM_WARPS, Sends
from fused_ops.gemm_inputs import GemmInputs
from fused_ops.symmetric.triton_channel import Receipt, TritonChannel

LARGEST_SIZE = 1 << 30  # of a dimension: tiles are counted in int32


def check_sizes(operator: str, rows: int, columns: int, inner: int) -> None:
    """ValueError where the kernels cannot count a dimension."""
    for name, size in {"M": rows, "N": columns, "K": inner}.items():
        if size > LARGEST_SIZE:
            raise ValueError(f"{operator}: the triton backend takes {name} up to {LARGEST_SIZE}, got {size}")


def call_arguments(lane: TritonChannel, sends: Sends, tag: int, receipt: Receipt) -> dict[str, Any]:
    """What every GEMM kernel takes of the call."""
    return {
        "state": lane.state,
        "record": lane.record,
        "control": lane.control,
        "arenas": lane.arenas.table,
        "slices": sends.slices,
        "rank": lane.rank,
        "world": lane.world,
        "tag": tag,
        "place": receipt.slot.place,
        "num_tiles": sends.num_tiles,
        "delay_us": lane.stress_delay_us,
    }


def factors(gemm: GemmInputs, shape: TileShape) -> dict[str, Any]:
    """What a kernel takes of input [rows, inner] and weight [columns, inner]."""
    inner = shape.inner(gemm.dtype)
    return {
        **Operand.of(gemm.input, shape.rows, inner).arguments("a"),
        **Operand.of(gemm.weight, shape.columns, inner).arguments("b"),
        "inner": gemm.input.shape[1],
    }


def output_arguments(gemm: GemmInputs, lane: TritonChannel) -> dict[str, Any]:
    """What a kernel takes to store rows of [rows, columns]."""
    return {
        "bias": lane.state if gemm.bias is None else gemm.bias.contiguous(),
        "HAS_BIAS": gemm.bias is not None,
        "DTYPE": triton_dtype(gemm.dtype),
        "ALIGN": alignment(gemm.columns, gemm.dtype),
    }


def has_tma(device: torch.device) -> bool:
    """Elsewhere Triton reads through a descriptor as through pointers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def triton_dtype(dtype: torch.dtype) -> Any:
    return {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }[dtype]


def alignment(columns: int, dtype: torch.dtype) -> int:
    """Elements, at most 16 bytes of them, whose number divides a row of `columns`."""
    return next(size for size in (16 // dtype.itemsize, 4, 2, 1) if columns % size == 0)


def describe_nothing(kind: int, at: int, value: int, feature: int) -> str:
    """The GEMM kernels look at no values."""
    return f"wrong value {value} at position {at}"


def finish_gemm(lane: TritonChannel, sends: Sends, tag: int, output: Tensor | Receipt) -> None:
    """Launch the end of a call whose kernel is launched; `output` is what it poisons when the call has failed."""
    address = output.slot.address if isinstance(output, Receipt) else output.data_ptr()
    finish_kernel[(1,)](
        lane.state,
        lane.record,
        lane.control,
        sends.slices,
        lane.state,
        lane.state,
        0,
        0,
        address,
        output.nbytes,
        lane.rank,
        lane.world,
        tag,
        lane.agreement.call_number,
        REJECTED_HERE=False,
        LANES=LANES,
        num_warps=NUM_WARPS,
    )
    lane.finished_calls += 1


@triton.jit(do_not_specialize=["output", "output_bytes"])
def poison_kernel(state, output: tl.int64, output_bytes: tl.int64):
    if tl.load(state + SUPPRESSED) != 0:
        poison(output, output_bytes, 4096)


def poison_failed(lane: TritonChannel, output: Tensor) -> None:
    """Poison another output of a call that is finished, if it has failed."""
    if output.numel():
        poison_kernel[(1,)](lane.state, output.data_ptr(), output.nbytes, num_warps=NUM_WARPS)
