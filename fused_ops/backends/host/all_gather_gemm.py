"""AllGather + GEMM on a CPU host: each rank's rows go straight into everybody's gathered input, one GEMM over which follows.

One core both copies and multiplies, so there is nothing to hide a copy behind, and a GEMM for each rank's rows would read the
weights as often.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.all_gather_gemm import OPERATOR
from fused_ops.backends.host.gemm_native import gather_rows, linear
from fused_ops.gemm_inputs import GemmInputs, agreed_total, check_total_rows, split_evenly
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.host_channel import HostChannel, host_channel


def all_gather_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None, total_rows: int | None, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.all_gather_gemm`; returns the output and the gathered input."""
    lane = host_channel(group, channel)
    if total_rows is None:
        total_rows = _agree(lane, input, weight, bias)
    with lane.agreement.call(OPERATOR) as call:
        gemm = GemmInputs.checked(OPERATOR, input, weight, bias)
        check_total_rows(OPERATOR, gemm.rows, total_rows, lane.world, lane.rank)
        inner = gemm.input.shape[1]
        tag, _ = lane.agreement.agree((OPERATOR, str(gemm.dtype), f"{total_rows} rows", f"inner size {inner}"))
        gathered = gather_rows(lane, call, tag, gemm.input, split_evenly(total_rows, lane.world))
        return linear(GemmInputs(gathered, gemm.weight, gemm.bias)), gathered


def _agree(lane: HostChannel, input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """All rows, or ValueError on every rank where they are not split evenly."""
    with lane.agreement.call(OPERATOR) as call:
        mine = torch.tensor([[GemmInputs.checked(OPERATOR, input, weight, bias).rows]])
        tag, _ = lane.agreement.agree((OPERATOR, "rows not given"))
        rows = gather_rows(lane, call, tag, mine, [1] * lane.world)
    return agreed_total(OPERATOR, rows.flatten().tolist())
