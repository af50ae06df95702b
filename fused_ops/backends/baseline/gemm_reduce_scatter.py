"""GEMM + ReduceScatter as it is done today: the vendor's GEMM, then the collective library (NCCL or gloo)."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused_ops import exposed
from fused_ops.gemm_inputs import GemmInputs, split_evenly
from fused_ops.gemm_reduce_scatter import OPERATOR
from fused_ops.symmetric.group import GroupContext, resolve

_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13


def gemm_reduce_scatter(
    input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.gemm_reduce_scatter`; `channel` means nothing here. Partial sums travel in input's dtype.

    The library wants equal pieces: uneven ones travel padded to the largest.
    """
    gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
    # In the GEMM of one rank the bias costs no pass over the output.
    partial = F.linear(gemm.input, gemm.weight, gemm.bias if group.rank == 0 else None)
    sizes = split_evenly(gemm.rows, group.world)
    most = sizes[0]
    with exposed.whole(partial.device):
        if gemm.rows % group.world:
            padded = partial.new_zeros(group.world, most, gemm.columns)
            for rank, rows in enumerate(partial.split(sizes)):
                padded[rank, : sizes[rank]] = rows
            partial = padded.flatten(0, 1)
        mine = partial.new_empty(most, gemm.columns)
        if mine.numel():
            _reduce_scatter_single(mine, partial, group=resolve(group.name))
    return mine[: sizes[group.rank]].clone() if sizes[group.rank] < most else mine
