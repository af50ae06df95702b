"""All-to-All + grouped GEMM as it is done today: rows picked by expert, the collective library (NCCL or gloo), rows sorted by
expert, then a grouped GEMM, or one an expert where torch has none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops import exposed
from fused_ops.all_to_all_gemm import OPERATOR
from fused_ops.grouped_gemm import grouped_linear
from fused_ops.moe_inputs import Routing, check_experts
from fused_ops.symmetric.group import GroupContext, resolve


def all_to_all_gemm(
    input: Tensor, weight: Tensor, tokens: Tensor, counts: Tensor, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused_ops.all_to_all_gemm`; `channel` means nothing here."""
    routing = Routing.checked(OPERATOR, tokens, counts, input.shape[:1].numel(), input.device, group.world)
    check_experts(OPERATOR, input, weight, routing)
    ranks = resolve(group.name)
    with exposed.whole(input.device):
        mine = counts.to(input.device).contiguous()
        by_source = torch.empty_like(mine)
        dist.all_to_all_single(by_source, mine, group=ranks)
        by_source = by_source.view(group.world, routing.local_experts).cpu()
        rows = input.new_empty(int(by_source.sum()), input.shape[1])
        dist.all_to_all_single(
            rows, input[routing.tokens], by_source.sum(1).tolist(), routing.rows_of_ranks, group=ranks
        )
        dispatched = transposed_pieces(rows, by_source)
    received = by_source.t().contiguous()
    return grouped_linear(dispatched, weight, received.sum(1).tolist()), dispatched, received


def transposed_pieces(rows: Tensor, sizes: Tensor) -> Tensor:
    """rows [sum(sizes), columns] hold pieces of sizes [A, B] in row-major order; the same pieces in column-major order."""
    pieces = rows.split(sizes.flatten().tolist())
    first, second = sizes.shape
    return torch.cat([pieces[a * second + b] for b in range(second) for a in range(first)])
