"""GEMM + AllReduce on a CPU host, direct two-phase: each rank adds up one part of the output and stores it everywhere.

Small outputs take one phase: everybody's partial sums go to everybody, and each rank adds them up.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.backends.host.gemm_native import Part, PartialSums, Product, Slices, row_parts, send_partials
from fused_ops.gemm_all_reduce import OPERATOR
from fused_ops.gemm_inputs import GemmInputs, split_evenly, starts, unflattened
from fused_ops.symmetric.agreement import library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import HostChannel, Incoming, host_channel

ONE_PHASE_BYTES = 512 << 10  # that a rank stores into its peers; a second phase costs about as much as these


@dataclass(frozen=True)
class Plan:
    """What follows from facts that all ranks share."""

    facts: tuple[str, ...]
    facts_of_sums: tuple[str, ...]
    one_phase: bool
    parts: tuple[Part, ...]  # which block of the output each rank adds up
    partials: Incoming
    sums: Incoming


@functools.lru_cache(maxsize=1024)
def plan(rows: int, columns: int, dtype: torch.dtype, has_bias: bool, rank: int, world: int) -> Plan:
    facts = (str(dtype), f"{rows} rows", f"{columns} columns", "with a bias" if has_bias else "no bias")
    one_phase = (world - 1) * 4 * rows * columns <= ONE_PHASE_BYTES
    parts = (Part(0, rows, 0, columns),) * world if one_phase else _parts(rows, columns, world)
    offsets = [dtype.itemsize * part.offset(columns) for part in parts]
    return Plan(
        (OPERATOR, *facts),
        (f"{OPERATOR} sums", *facts),
        one_phase,
        parts,
        Incoming.packed([4 * parts[rank].numel] * world),
        Incoming.strided(offsets, dtype.itemsize * rows * columns),
    )


def gemm_all_reduce(input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int) -> Tensor:
    """See `fused_ops.gemm_all_reduce`."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias, leading=True)
        bias = None if bias is None else bias.contiguous()
        planned = plan(gemm.rows, gemm.columns, gemm.dtype, bias is not None, lane.rank, lane.world)
        tag, _ = lane.agreement.agree(planned.facts)
        if planned.one_phase:
            output = _one_phase(lane, call, tag, gemm, bias, planned)
        else:
            partials = _exchange_partials(lane, call, tag, gemm, planned)
    if not planned.one_phase:
        output = _gather_sums(lane, partials, gemm, bias, planned)
    return unflattened(output, input)


def _one_phase(lane: HostChannel, call: int, tag: int, gemm: GemmInputs, bias: Tensor | None, planned: Plan) -> Tensor:
    whole = planned.parts[lane.rank]
    output = torch.empty(gemm.rows, gemm.columns, dtype=gemm.dtype)
    with lane.receive(tag, planned.partials) as receipt:
        Product(gemm).store(whole, receipt.address + planned.partials.offsets[lane.rank])
        sums = PartialSums.of(receipt.address, bias, whole, lane.world, gemm.dtype)
        Slices(lane, call, tag).native(
            library().fo_gemm_all_to_all_sum, ctypes.byref(sums), ctypes.c_void_p(output.data_ptr())
        )
    return output


def _exchange_partials(lane: HostChannel, call: int, tag: int, gemm: GemmInputs, planned: Plan) -> Tensor:
    """First phase: every rank's partial sums of this rank's part, [W, rows, columns] in float32, in shared memory."""
    mine = planned.parts[lane.rank]
    with lane.receive(tag, planned.partials) as receipt:
        slices = Slices(lane, call, tag)
        send_partials(lane, slices, gemm, planned.parts, receipt.address + planned.partials.offsets[lane.rank])
        slices.wait()
        return receipt.tensor((lane.world, mine.rows, mine.columns), torch.float32)


def _gather_sums(lane: HostChannel, partials: Tensor, gemm: GemmInputs, bias: Tensor | None, planned: Plan) -> Tensor:
    """Second phase: this rank's sum goes into every rank's output, and theirs come into this one's."""
    with lane.agreement.call(OPERATOR) as call:
        tag, _ = lane.agreement.agree(planned.facts_of_sums)
        mine, incoming = planned.parts[lane.rank], planned.sums
        some_bias = None if bias is None else bias[mine.first_column : mine.first_column + mine.columns]
        sums = PartialSums.of(partials.data_ptr(), some_bias, mine, lane.world, gemm.dtype)
        with lane.receive(tag, incoming) as receipt:
            Slices(lane, call, tag).native(
                library().fo_gemm_gather_sums,
                ctypes.byref(sums),
                ctypes.c_void_p(receipt.address + incoming.offsets[lane.rank]),
                ctypes.c_int64(gemm.columns),
                ctypes.c_int64(incoming.bytes[lane.rank]),
            )
            return receipt.tensor((gemm.rows, gemm.columns), gemm.dtype)


def _parts(rows: int, columns: int, world: int) -> tuple[Part, ...]:
    """Whole columns where they are many, so that each weight is read once, else whole rows."""
    if columns < rows:
        return row_parts(rows, columns, world)
    sizes = split_evenly(columns, world)
    return tuple(Part(0, rows, first, size) for first, size in zip(starts(sizes), sizes, strict=True))
