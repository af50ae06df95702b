"""GEMM + ReduceScatter on a CPU host: partial sums go straight into the rank that keeps those rows, the others' rows first."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fused_ops.backends.host.gemm_native import Part, PartialSums, Slices, row_parts, send_partials
from fused_ops.gemm_inputs import GemmInputs
from fused_ops.gemm_reduce_scatter import OPERATOR
from fused_ops.symmetric.agreement import library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import Incoming, host_channel


def gemm_reduce_scatter(
    input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.gemm_reduce_scatter`."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
        bias = None if bias is None else bias.contiguous()
        parts, facts, incoming = _plan(gemm.rows, gemm.columns, gemm.dtype, bias is not None, lane.rank, lane.world)
        tag, _ = lane.agreement.agree(facts)
        mine = parts[lane.rank]
        output = torch.empty(mine.rows, gemm.columns, dtype=gemm.dtype)
        with lane.receive(tag, incoming) as receipt:
            slices = Slices(lane, call, tag)
            send_partials(lane, slices, gemm, parts, receipt.address + incoming.offsets[lane.rank])
            sums = PartialSums.of(receipt.address, bias, mine, lane.world, gemm.dtype)
            slices.native(library().fo_gemm_wait_and_sum, ctypes.byref(sums), ctypes.c_void_p(output.data_ptr()))
        return output


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int, columns: int, dtype: torch.dtype, has_bias: bool, rank: int, world: int
) -> tuple[tuple[Part, ...], tuple[str, ...], Incoming]:
    """(which rows each rank keeps, the facts that ranks agree on, where partial sums of this rank's rows go)."""
    parts = row_parts(rows, columns, world)
    facts = (OPERATOR, str(dtype), f"{rows} rows", f"{columns} columns", "with a bias" if has_bias else "no bias")
    return parts, facts, Incoming.packed([4 * parts[rank].numel] * world)
