"""GEMM + AllReduce as it is done today: the vendor's GEMM, then the collective library (NCCL or gloo)."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused_ops import exposed
from fused_ops.gemm_all_reduce import OPERATOR
from fused_ops.gemm_inputs import GemmInputs, unflattened
from fused_ops.symmetric.group import GroupContext, resolve


def gemm_all_reduce(input: Tensor, weight: Tensor, bias: Tensor | None, group: GroupContext, channel: int) -> Tensor:
    """See `fused_ops.gemm_all_reduce`; `channel` means nothing here. Partial sums travel in input's dtype."""
    gemm = GemmInputs.checked(OPERATOR, input, weight, bias, leading=True)
    # In the GEMM of one rank the bias costs no pass over the output.
    output = F.linear(gemm.input, gemm.weight, gemm.bias if group.rank == 0 else None)
    with exposed.whole(output.device):
        dist.all_reduce(output, group=resolve(group.name))
    return unflattened(output, input)
