"""Products of rows that are grouped by expert, each group with its expert's weight, and the gradients of those weights.

What the operators of Mixture of Experts do on one rank; nothing here has peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # in bytes, of every row that the grouped kernel reads


def grouped_linear(input: Tensor, weight: Tensor, rows: Sequence[int]) -> Tensor:
    """input [sum(rows), K] @ weight[e]^T for the rows of each expert e; weight [E, N, K] of any strides; [sum(rows), N]."""
    if _has_kernel(input, weight.shape[1]):
        if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()) or weight.data_ptr() % ALIGNMENT:
            weight = weight.clone(memory_format=torch.contiguous_format)
        return torch._grouped_mm(_aligned(input), weight.transpose(1, 2), offs=_ends(rows, input.device))
    output = input.new_empty(input.shape[0], weight.shape[1])
    for expert, (first, last) in _runs(rows):
        torch.mm(input[first:last], weight[expert].t(), out=output[first:last])
    return output


@torch.library.custom_op("fused_ops::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(grad: Tensor, input: Tensor, received: Tensor) -> Tensor:
    """grad^T @ input for the rows of each expert: [E_r, N, K] of grad [S, N] and input [S, K]; zeros where it has none.

    received: [E_r, W] int64 on the CPU; row e sums to how many rows expert e has.
    """
    rows = received.sum(1).tolist()
    if _has_kernel(input, grad.shape[1]):
        output = torch._grouped_mm(_aligned(grad).t(), _aligned(input), offs=_ends(rows, grad.device))
        if 0 in rows:  # what a group without rows leaves behind is not defined by every version
            output[[expert for expert, count in enumerate(rows) if not count]] = 0
        return output
    output = grad.new_zeros(len(rows), grad.shape[1], input.shape[1])
    for expert, (first, last) in _runs(rows):
        torch.mm(grad[first:last].t(), input[first:last], out=output[expert])
    return output


@grouped_weight_gradient.register_fake
def _(grad, input, received):
    return grad.new_empty((received.shape[0], grad.shape[1], input.shape[1]))


def _has_kernel(input: Tensor, columns: int) -> bool:
    """Whether torch has one kernel for all groups of [S, K] inputs and that many columns: of bfloat16 on CUDA, where rows
    begin at whole 16 bytes."""
    return (
        input.device.type == "cuda"
        and input.dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(input.device) >= (8, 0)
        and input.numel() > 0
        and columns > 0
        and input.shape[1] * input.itemsize % ALIGNMENT == columns * input.itemsize % ALIGNMENT == 0
    )


def _aligned(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows


def _ends(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _runs(rows: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(expert, (its first row, the row after its last)) of every expert that has rows."""
    runs, at = [], 0
    for expert, count in enumerate(rows):
        if count:
            runs.append((expert, (at, at + count)))
        at += count
    return runs
