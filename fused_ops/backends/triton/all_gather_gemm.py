"""AllGather + GEMM in Triton: each rank's rows go straight into everybody's gathered input; tiles start as their rows arrive.

Where slots are in host memory, which every column of tiles would read anew, the library multiplies what is gathered.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fused_ops.all_gather_gemm import OPERATOR
from fused_ops.backends.triton.gemm_gather import BAND, COPY_BYTES, gather_gemm_kernel
from fused_ops.backends.triton.gemm_launch import (
    alignment,
    call_arguments,
    check_sizes,
    describe_nothing,
    finish_gemm,
    has_tma,
    output_arguments,
    poison_failed,
)
from fused_ops.backends.triton.gemm_operands import Operand, padded
from fused_ops.backends.triton.gemm_partials import FLAG_BYTES, aligned_up
from fused_ops.backends.triton.gemm_tiles import grid_of, sms_of, tile_shape
from fused_ops.backends.triton.launch import Sends, open_channel
from fused_ops.gemm_inputs import GemmInputs, agreed_total, check_total_rows, split_evenly
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.triton_channel import TritonChannel

MOST_PIECES_ACROSS = 32
MOST_PUSHERS = 16  # programs; so many keep a link busy


@dataclass(frozen=True)
class Plan:
    """What follows from facts that all ranks share."""

    facts: tuple[str, ...]
    rows: tuple[int, ...]  # of each rank
    width: int  # from row to row in a slot, elements
    bands: int  # the most that a rank's rows make
    piece_steps: int  # of COPY_BYTES that a piece is wide
    pieces_across: int
    flags: int  # where they begin in a slot, in bytes
    num_flags: int

    @property
    def slot_bytes(self) -> int:
        return self.flags + self.num_flags * FLAG_BYTES

    def pieces(self, rank: int) -> int:
        """Of a rank's rows; one that is empty where there are none, since every peer hears from every rank."""
        return max(1, triton.cdiv(self.rows[rank], BAND.value) * self.pieces_across)


@functools.lru_cache(maxsize=1024)
def plan(rows: int, inner: int, dtype: torch.dtype, has_bias: bool, world: int) -> Plan:
    facts = (OPERATOR, str(dtype), f"{rows} rows", f"inner size {inner}", "with a bias" if has_bias else "no bias")
    parts = split_evenly(rows, world)
    steps = triton.cdiv(inner * dtype.itemsize, COPY_BYTES.value)
    piece_steps = max(1, triton.cdiv(steps, MOST_PIECES_ACROSS))
    pieces_across = triton.cdiv(steps, piece_steps)
    bands, width = triton.cdiv(parts[0], BAND.value), padded(inner, dtype)
    flags = aligned_up(rows * width * dtype.itemsize)
    return Plan(
        facts, tuple(parts), width, bands, piece_steps, pieces_across, flags, world * bands * pieces_across
    )  # fmt: skip


def all_gather_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None, total_rows: int | None, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.all_gather_gemm`; returns the output and the gathered input."""
    lane = open_channel(group, channel, input.device)
    if total_rows is None:
        total_rows = _agree(lane, input, weight, bias)
    with lane.call(OPERATOR):
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
        check_total_rows(OPERATOR, gemm.rows, total_rows, lane.world, lane.rank)
        inner = gemm.input.shape[1]
        check_sizes(OPERATOR, total_rows, gemm.columns, inner)
        planned = plan(total_rows, inner, gemm.dtype, bias is not None, lane.world)
        tag, _ = lane.agreement.agree(planned.facts)
        lane.reserve(planned.slot_bytes)
        lane.describe(describe_nothing)
        return _gather_and_multiply(lane, tag, gemm, planned)


def _agree(lane: TritonChannel, input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """All rows, or ValueError on every rank where they are not split evenly."""
    with lane.call(OPERATOR):
        mine = GemmInputs.checked(OPERATOR, input, weight, bias).rows
        told = [0] * (2 * lane.world)
        told[lane.rank] = told[lane.world + lane.rank] = mine  # as rows that this rank sends to itself
        _, rows = lane.agreement.agree((OPERATOR, "rows not given"), told)
        return agreed_total(OPERATOR, [rows[rank][rank] for rank in range(lane.world)])


def _gather_and_multiply(lane: TritonChannel, tag: int, gemm: GemmInputs, planned: Plan) -> tuple[Tensor, Tensor]:
    rows, inner = sum(planned.rows), gemm.input.shape[1]
    source = gemm.input.contiguous()
    sms = sms_of(lane, waits_first=True)
    shape = tile_shape(planned.rows[0], gemm.columns, lane.world, gemm.dtype, sms)
    block = shape.inner(gemm.dtype)
    multiplies = lane.link != "pinned"
    order = [(lane.rank - turn) % lane.world for turn in range(lane.world)]
    tiles = [shape.tiles(planned.rows[r], gemm.columns) if multiplies else 0 for r in order]
    starts = list(itertools.accumulate(tiles, initial=0))
    sends = Sends(
        slices=lane.constants([planned.pieces(lane.rank)] * lane.world),
        first_tiles=lane.constants(starts[:-1]),
        num_tiles=starts[-1],
    )
    receipt = lane.receive((rows, planned.width), gemm.dtype)
    arrived = receipt.slot.tensor(receipt.output.shape, gemm.dtype) if receipt.is_staged else receipt.output
    output = gemm.input.new_empty(rows if multiplies else 0, gemm.columns)
    own_rows = Operand.of(source, shape.rows, block).descriptor
    (programs,) = grid_of(lane, shape, max(sends.num_tiles, planned.pieces(lane.rank)), waits_first=True)
    gather_gemm_kernel[(programs,)](
        **call_arguments(lane, sends, tag, receipt),
        a=own_rows,
        gathered=Operand.of(arrived[:, :inner], shape.rows, block).descriptor if multiplies else own_rows,
        **Operand.of(gemm.weight, shape.columns, block).arguments("b"),
        **output_arguments(gemm, lane),
        **shape.constants(gemm.dtype, lane.device),
        first_tiles=sends.first_tiles,
        source=source,
        output=output.data_ptr(),
        own=receipt.slot.address,
        rows=rows,
        columns=gemm.columns,
        inner=inner,
        width=planned.width,
        flags=planned.flags,
        num_flags=planned.num_flags,
        num_pieces=planned.pieces(lane.rank),
        pieces_across=planned.pieces_across,
        piece_steps=planned.piece_steps,
        bands=planned.bands,
        pushers=min(MOST_PUSHERS, max(1, programs // 4)) if sends.num_tiles else programs,
        HAS_TMA=has_tma(lane.device),
        INNER_ALIGN=alignment(inner, gemm.dtype),
    )
    finish_gemm(lane, sends, tag, receipt)
    gathered = receipt.deliver() if inner == planned.width else arrived[:, :inner].contiguous()
    if not multiplies:
        return F.linear(gathered, gemm.weight, gemm.bias), gathered
    poison_failed(lane, output)
    return output, gathered
