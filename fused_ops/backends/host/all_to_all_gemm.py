"""All-to-All + grouped GEMM on a CPU host: rows go straight to their places among the rows of their experts, remote ranks first.

Each rank then multiplies: of an expert with many rows what each source sent, as it comes in, its own first; of one with few
rows, where a product for each source would read the weights as often, all of them at the end. Which of the two is a function of
the routing alone, and so are the results' bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fused_ops.all_to_all_gemm import OPERATOR, received_by
from fused_ops.backends.host.gemm_native import Slices, gather_rows, others, store_linear, takes_pieces, tensor_at
from fused_ops.gemm_inputs import GemmInputs
from fused_ops.moe_inputs import Routing, check_counts, check_experts, first_rows
from fused_ops.symmetric.agreement import int64_array, library
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import HostChannel, Incoming, host_channel


def all_to_all_gemm_counts(counts: Tensor, device: torch.device, group: GroupContext, channel: int) -> Tensor:
    """Every rank's counts, [W, E]."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        mine = torch.tensor([check_counts(OPERATOR, counts, device, lane.world)])
        tag, _ = lane.agreement.agree((OPERATOR, f"counts of {mine.shape[1]} experts"))
        return gather_rows(lane, call, tag, mine, [1] * lane.world)


def all_to_all_gemm(
    input: Tensor, weight: Tensor, tokens: Tensor, all_counts: Tensor, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.all_to_all_gemm`, of which this is the part after the counts."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        num_tokens = input.shape[:1].numel()
        routing = Routing.checked(OPERATOR, tokens, all_counts[lane.rank], num_tokens, input.device, lane.world)
        check_experts(OPERATOR, input, weight, routing)
        columns = input.shape[1]
        sizes = [received_by(all_counts, rank).tolist() for rank in range(lane.world)]
        received = sizes[lane.rank]
        from_sources = [sum(of_expert[source] for of_expert in received) for source in range(lane.world)]
        facts = (OPERATOR, str(input.dtype), f"{len(routing.counts)} experts", f"{columns} columns")
        tag, _ = lane.agreement.agree(facts, [*routing.rows_of_ranks, *from_sources])
        row_bytes = columns * input.element_size()
        incoming = Incoming.strided([0] * lane.world, sum(from_sources) * row_bytes)
        with lane.receive(tag, incoming) as receipt:
            slices = Slices(lane, call, tag)
            _send(lane, slices, input, routing, sizes, receipt.address)
            rows = tensor_at(receipt.address, sum(from_sources), columns, input.dtype)
            output = _multiply(lane, slices, rows, weight, received)
            return output, receipt.tensor((sum(from_sources), columns), input.dtype)


def _send(
    lane: HostChannel, slices: Slices, input: Tensor, routing: Routing, sizes: list[list[list[int]]], own: int
) -> None:
    """This rank's routed rows, to their places in every rank's memory; in this rank's they begin from `own` (an address) on."""
    if input.stride(1) != 1:
        input = input.contiguous()
    places = [of_expert[lane.rank] for of_rank in sizes for of_expert in first_rows(of_rank)]
    slices.native(
        library().fo_moe_send_rows,
        ctypes.c_void_p(input.data_ptr()),
        ctypes.c_int64(input.shape[1] * input.element_size()),
        ctypes.c_int64(input.stride(0) * input.element_size()),
        ctypes.c_void_p(routing.tokens.data_ptr()),
        ctypes.c_int64(routing.local_experts),
        int64_array(routing.counts),
        int64_array(places),
        int64_array([sum(map(sum, of_rank)) for of_rank in sizes]),
        ctypes.c_void_p(own),
    )


def _multiply(lane: HostChannel, slices: Slices, rows: Tensor, weight: Tensor, received: list[list[int]]) -> Tensor:
    """The product of every expert's rows; waits for them, those of the ranks that begin with this one first."""
    output = rows.new_empty(rows.shape[0], weight.shape[1])

    def multiply(expert: int, first: int, count: int) -> None:
        store_linear(GemmInputs(rows[first : first + count], weight[expert], None), output[first : first + count])

    firsts = first_rows(received)
    in_pieces = [takes_pieces(of_expert) for of_expert in received]
    for source in [lane.rank, *reversed(others(lane))]:
        if source != lane.rank:
            slices.wait_for(source)
        for expert, of_expert in enumerate(received):
            if in_pieces[expert]:
                multiply(expert, firsts[expert][source], of_expert[source])
    for expert, of_expert in enumerate(received):
        if not in_pieces[expert]:
            multiply(expert, firsts[expert][0], sum(of_expert))
    return output
