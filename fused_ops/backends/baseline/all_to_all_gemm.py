"""All-to-All + grouped GEMM as it is done today: rows picked by expert, the collective library (NCCL or gloo), rows sorted by
expert, then a grouped GEMM, or one an expert where torch has none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops import exposed
from fused_ops.all_to_all_gemm import OPERATOR, received_by
from fused_ops.grouped_gemm import grouped_linear
from fused_ops.moe_inputs import Routing, check_counts, check_experts
from fused_ops.symmetric.group import GroupContext, resolve

_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


def all_to_all_gemm_counts(counts: Tensor, device: torch.device, group: GroupContext, channel: int) -> Tensor:
    """Every rank's counts, [W, E] on the CPU; `channel` means nothing here."""
    mine = torch.tensor(check_counts(OPERATOR, counts, device, group.world), device=device)
    with exposed.whole(device):
        all_counts = mine.new_empty(group.world * mine.shape[0])
        _all_gather_single(all_counts, mine, group=resolve(group.name))
    return all_counts.view(group.world, -1).cpu()


def all_to_all_gemm(
    input: Tensor, weight: Tensor, tokens: Tensor, all_counts: Tensor, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.all_to_all_gemm`, of which this is the part after the counts; `channel` means nothing here."""
    routing = Routing.checked(
        OPERATOR, tokens, all_counts[group.rank], input.shape[:1].numel(), input.device, group.world
    )
    check_experts(OPERATOR, input, weight, routing)
    received = received_by(all_counts, group.rank)
    from_sources = received.sum(0).tolist()
    with exposed.whole(input.device):
        rows = input.new_empty(sum(from_sources), input.shape[1])
        dist.all_to_all_single(
            rows, input[routing.tokens], from_sources, routing.rows_of_ranks, group=resolve(group.name)
        )
        dispatched = transposed_pieces(rows, received.t())
    return grouped_linear(dispatched, weight, received.sum(1).tolist()), dispatched


def transposed_pieces(rows: Tensor, sizes: Tensor) -> Tensor:
    """rows [sum(sizes), columns] hold pieces of sizes [A, B] in row-major order; the same pieces in column-major order."""
    pieces = rows.split(sizes.reshape(-1).tolist())
    first, second = sizes.shape
    return torch.cat([pieces[a * second + b] for b in range(second) for a in range(first)])
