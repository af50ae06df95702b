"""Column- and row-parallel linears (Megatron-LM, arXiv 1909.08053), on the operators of `fused_ops`.

With W ranks, M rows (tokens), and r this rank; which operator each pass runs:

| layer | forward | gradient of the input |
|---|---|---|
| column | local GEMM | `gemm_all_reduce` |
| column, sequence parallel | `all_gather_gemm` | `gemm_reduce_scatter` |
| row | `gemm_all_reduce` | local GEMM |
| row, sequence parallel | `gemm_reduce_scatter` | `all_gather_gemm` |

`total_rows` is M where the rows are split over ranks (sequence parallel), and None where every rank holds them all. On one
rank both layers are `torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import fused_ops
from models.parallel.shards import Shard, even_split
from models.parallel.tensor_parallel import TensorParallel


def column_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel, total_rows: int | None = None
) -> Tensor:
    """input @ weight_r^T + bias_r: this rank's columns of the output, for all rows.

    Per rank: input [M, K], or its rows [M_r, K] with `total_rows`; weight [N_r, K]; bias [N_r]; returns [M, N_r].
    """
    input, weight, bias = _under_autocast(input, weight, bias)
    if tp.world == 1:
        return F.linear(input, weight, bias)
    if total_rows is None:
        return _ColumnParallel.apply(input, weight, bias, tp)
    output = fused_ops.all_gather_gemm(
        input, weight, bias, total_rows=total_rows, save_gathered=tp.save_gathered, **tp.options("all_gather_gemm")
    )
    assert isinstance(output, Tensor)  # nothing else was asked for
    return output


def row_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel, total_rows: int | None = None
) -> Tensor:
    """Sum over ranks of input_r @ weight_r^T, plus bias once.

    Per rank: input [M, K_r], weight [N, K_r], bias [N] (replicated); returns [M, N], or its rows [M_r, N] with `total_rows`.
    """
    input, weight, bias = _under_autocast(input, weight, bias)
    if tp.world == 1:
        return F.linear(input, weight, bias)
    if total_rows is None:
        return fused_ops.gemm_all_reduce(input, weight, bias, **tp.options("gemm_all_reduce"))
    return fused_ops.gemm_reduce_scatter(input, weight, bias, **tp.options("gemm_reduce_scatter"))


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, tp):
        ctx.save_for_backward(input, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = fused_ops.gemm_all_reduce(grad, weight.t(), **ctx.tp.options("gemm_all_reduce"))
        if ctx.needs_input_grad[1]:
            grad_weight = grad.t() @ input
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_input, grad_weight, grad_bias, None


def _under_autocast(*tensors: Tensor | None) -> tuple:
    """The tensors in autocast's dtype where autocast is on: operators of a library's own are none that it casts for."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None else t.to(dtype) for t in tensors)


class ColumnParallelLinear(nn.Module):
    """Output columns split over ranks, in whole units of `unit_size` columns (a group of attention heads, say).

    weight: [units_r * unit_size, K]. With `stacked` = S > 1 products of one input, [S, units_r * unit_size, K], and the
    output is [M, S, units_r * unit_size]. bias likewise, without K.
    """

    def __init__(
        self, in_features: int, units: int, unit_size: int, *, bias: bool, tp: TensorParallel, stacked: int = 1
    ) -> None:
        super().__init__()
        self.tp = tp
        start, stop = (unit * unit_size for unit in even_split(units, tp.world, tp.rank))
        lead = () if stacked == 1 else (stacked,)
        shard = Shard(len(lead), units * unit_size, start, stop)
        self.weight = nn.Parameter(torch.empty(*lead, shard.size, in_features))
        self.bias = nn.Parameter(torch.empty(*lead, shard.size)) if bias else None
        self.shards = {"weight": shard, "bias": shard} if bias else {"weight": shard}

    def forward(self, input: Tensor, total_rows: int | None = None) -> Tensor:
        """[M, N_r] or [M, stacked, N_r] of [M, K], or of this rank's rows [M_r, K] of `total_rows`."""
        bias = None if self.bias is None else self.bias.flatten()
        output = column_parallel_linear(input, self.weight.flatten(0, -2), bias, self.tp, total_rows)
        return output.view(output.shape[0], *self.weight.shape[:-1])


class RowParallelLinear(nn.Module):
    """Input columns split over ranks, in whole units of `unit_size`: takes what a ColumnParallelLinear gives.

    weight: [N, units_r * unit_size]; bias: [N], replicated.
    """

    def __init__(self, units: int, unit_size: int, out_features: int, *, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        start, stop = (unit * unit_size for unit in even_split(units, tp.world, tp.rank))
        shard = Shard(1, units * unit_size, start, stop)
        self.weight = nn.Parameter(torch.empty(out_features, shard.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.shards = {"weight": shard}

    def forward(self, input: Tensor, total_rows: int | None = None) -> Tensor:
        """[M, N] of [M, K_r], or this rank's rows [M_r, N] of it where `total_rows` (= M) is given."""
        return row_parallel_linear(input, self.weight, self.bias, self.tp, total_rows)
