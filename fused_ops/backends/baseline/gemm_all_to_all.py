"""Grouped GEMM + All-to-All as it is done today: a grouped GEMM, or one an expert where torch has none, rows sorted by rank, the
collective library (NCCL or gloo), then the weighted sum of each token's rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops import exposed
from fused_ops.backends.baseline.all_to_all_gemm import transposed_pieces
from fused_ops.gemm_all_to_all import OPERATOR
from fused_ops.grouped_gemm import grouped_linear
from fused_ops.moe_inputs import Routing, check_experts, check_gates, check_received
from fused_ops.symmetric.group import GroupContext, resolve


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
    """See `fused_ops.gemm_all_to_all`; returns the output and the products. `channel` means nothing here. On a GPU the order in
    which a token's rows are added is not fixed."""
    routing = Routing.checked(OPERATOR, tokens, counts, num_tokens, input.device, group.world)
    check_experts(OPERATOR, input, weight, routing)
    sizes = torch.tensor(check_received(OPERATOR, received, input.shape[0], routing.local_experts, group.world))
    check_gates(OPERATOR, gates, routing, input)
    computed = grouped_linear(input, weight, sizes.sum(1).tolist())
    with exposed.whole(input.device):
        products = input.new_empty(routing.rows, weight.shape[1])
        dist.all_to_all_single(
            products,
            transposed_pieces(computed, sizes),
            routing.rows_of_ranks,
            sizes.sum(0).tolist(),
            group=resolve(group.name),
        )
    sums = products.new_zeros(num_tokens, weight.shape[1], dtype=torch.float32)
    sums.index_add_(0, routing.tokens, products * gates.float().unsqueeze(1))
    return sums.to(input.dtype), products
