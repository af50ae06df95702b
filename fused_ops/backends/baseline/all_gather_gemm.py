"""AllGather + GEMM as it is done today: the collective library (NCCL or gloo), then the vendor's GEMM."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused_ops import exposed
from fused_ops.all_gather_gemm import OPERATOR
from fused_ops.gemm_inputs import GemmInputs, agreed_total, check_total_rows, split_evenly
from fused_ops.symmetric.group import GroupContext, resolve

_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


def all_gather_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None, total_rows: int | None, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.all_gather_gemm`; returns the output and the gathered input. `channel` means nothing here.

    The library wants equal pieces: uneven ones travel padded to the largest.
    """
    gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
    with exposed.whole(input.device):
        if total_rows is None:
            total_rows = _agree(gemm, group)
        check_total_rows(OPERATOR, gemm.rows, total_rows, group.world, group.rank)
        gathered = _gather(gemm.input, split_evenly(total_rows, group.world), group)
    return F.linear(gathered, gemm.weight, gemm.bias), gathered


def _agree(gemm: GemmInputs, group: GroupContext) -> int:
    mine = torch.tensor([gemm.rows], device=gemm.input.device)
    all_rows = mine.new_empty(group.world)
    _all_gather_single(all_rows, mine, group=resolve(group.name))
    return agreed_total(OPERATOR, all_rows.tolist())


def _gather(input: Tensor, sizes: list[int], group: GroupContext) -> Tensor:
    most, inner = sizes[0], input.shape[1]
    if not most * inner:
        return input.new_empty(sum(sizes), inner)
    if input.shape[0] < most:
        input = torch.cat([input, input.new_zeros(most - input.shape[0], inner)])
    gathered = input.new_empty(group.world * most, inner)
    _all_gather_single(gathered, input.contiguous(), group=resolve(group.name))
    if sizes[-1] == most:
        return gathered
    pieces = gathered.split(most)
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
