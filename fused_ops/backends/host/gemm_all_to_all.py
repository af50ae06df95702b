"""Grouped GEMM + All-to-All on a CPU host: experts' products go straight into the ranks that their tokens are from, the others'
first, a flag for each rank once its last one is stored.

Products of an expert with many rows are computed for one rank at a time, in that rank's memory. Of one with few rows, where this
would read the weights as often, they are computed at once and copied. Which of the two is a function of the routing alone, and so
are the results' bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fused_ops.backends.host.gemm_native import (
    DTYPE_CODES,
    Slices,
    linear,
    others,
    store_linear,
    takes_pieces,
    tensor_at,
)
from fused_ops.gemm_all_to_all import OPERATOR
from fused_ops.gemm_inputs import GemmInputs
from fused_ops.moe_inputs import Routing, check_experts, check_gates, check_received, first_rows
from fused_ops.symmetric.agreement import library, split_number
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import Incoming, host_channel


def gemm_all_to_all(
    input: Tensor,
    weight: Tensor,
    received: Tensor,
    tokens: Tensor,
    counts: Tensor,
    gates: Tensor,
    num_tokens: int,
    group: GroupContext,
    channel: int,
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.gemm_all_to_all`; returns the output and the products."""
    lane = host_channel(group, channel)
    with lane.agreement.call(OPERATOR) as call:
        routing = Routing.checked(OPERATOR, tokens, counts, num_tokens, input.device, lane.world)
        check_experts(OPERATOR, input, weight, routing)
        sizes = check_received(OPERATOR, received, input.shape[0], routing.local_experts, lane.world)
        check_gates(OPERATOR, gates, routing, input)
        columns = weight.shape[1]
        facts = (OPERATOR, str(input.dtype), f"{len(routing.counts)} experts", f"{columns} columns")
        sends = [split_number([of_expert[home] for of_expert in sizes]) for home in range(lane.world)]
        expects = [split_number(routing.of_rank(rank)) for rank in range(lane.world)]
        tag, _ = lane.agreement.agree(facts, [*sends, *expects])
        row_bytes = columns * input.element_size()
        incoming = Incoming.packed([rows * row_bytes for rows in routing.rows_of_ranks])
        with lane.receive(tag, incoming) as receipt:
            slices = Slices(lane, call, tag)
            experts = _Experts(input, weight, sizes)
            for home in others(lane):
                experts.store(home, slices.destination(home, experts.rows_for(home) * row_bytes))
                slices.signal(home)
            experts.store(lane.rank, receipt.address + incoming.offsets[lane.rank])
            slices.wait()
            products = receipt.tensor((routing.rows, columns), input.dtype)
        return _combine(products, gates, routing, num_tokens), products


class _Experts:
    """The products of this rank's experts, a part for each rank that their tokens are from."""

    def __init__(self, input: Tensor, weight: Tensor, sizes: list[list[int]]) -> None:
        self._input, self._weight, self._sizes = input, weight, sizes
        self._firsts = first_rows(sizes)
        self._computed: dict[int, Tensor] = {}

    def rows_for(self, home: int) -> int:
        return sum(of_expert[home] for of_expert in self._sizes)

    def store(self, home: int, address: int | None) -> None:
        """The products for that rank, packed, at `address` (None where there are none)."""
        if address is None:
            return
        out = tensor_at(address, self.rows_for(home), self._weight.shape[1], self._input.dtype)
        at = 0
        for expert, of_expert in enumerate(self._sizes):
            count = of_expert[home]
            if count:
                self._store_piece(expert, home, out[at : at + count])
                at += count

    def _store_piece(self, expert: int, home: int, out: Tensor) -> None:
        of_expert, firsts = self._sizes[expert], self._firsts[expert]
        if takes_pieces(of_expert):
            rows = self._input[firsts[home] : firsts[home] + of_expert[home]]
            store_linear(GemmInputs(rows, self._weight[expert], None), out)
            return
        if expert not in self._computed:
            rows = self._input[firsts[0] : firsts[0] + sum(of_expert)]
            self._computed[expert] = linear(GemmInputs(rows, self._weight[expert], None))
        first = firsts[home] - firsts[0]
        out.copy_(self._computed[expert][first : first + of_expert[home]])


def _combine(products: Tensor, gates: Tensor, routing: Routing, num_tokens: int) -> Tensor:
    """For each token the sum of gate times product over its rows."""
    output = torch.empty(num_tokens, products.shape[1], dtype=products.dtype)
    factors = gates.float().contiguous()
    library().fo_moe_combine(
        DTYPE_CODES[products.dtype],
        ctypes.c_void_p(products.data_ptr()),
        ctypes.c_void_p(factors.data_ptr()),
        ctypes.c_void_p(routing.tokens.data_ptr()),
        ctypes.c_int64(routing.rows),
        ctypes.c_int64(num_tokens),
        ctypes.c_int64(products.shape[1]),
        ctypes.c_void_p(output.data_ptr()),
    )
    return output
