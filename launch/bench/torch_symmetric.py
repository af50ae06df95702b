"""torch's own operators over symmetric memory, as rivals on GPUs: columns of the GEMM operators.

`baseline_one_shot`, `baseline_two_shot`: the vendor's GEMM into symmetric memory, then torch.ops.symm_mem.one_shot_all_reduce
or two_shot_all_reduce_. `baseline_torch_fused`: fused_matmul_reduce_scatter, fused_all_gather_matmul. They have no backward.

What a platform refuses (a device, a size, an alignment) it refuses in the first call, which tells it in a line of its own.
Nothing is copied out of the symmetric buffer: what two_shot_all_reduce_ gives lasts until its next call, which favours it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from fused_ops.symmetric.group import group_name, resolve

ONE_SHOT, TWO_SHOT, FUSED = COLUMNS = ("baseline_one_shot", "baseline_two_shot", "baseline_torch_fused")

Pick = Callable[[int], tuple[Tensor, Tensor]]  # the i-th call's input [M, K] and weight [N, K]


def gemm_all_reduce(column: str, pick: Pick, group: dist.ProcessGroup | None) -> Callable[[int], Tensor]:
    name = group_name(group)

    @functools.cache
    def buffer() -> Tensor:
        input, weight = pick(0)
        made = symmetric.empty(len(input), len(weight), dtype=input.dtype, device=input.device)
        symmetric.rendezvous(made, resolve(name))
        return made

    def run(i: int) -> Tensor:
        input, weight = pick(i)
        partial = torch.mm(input, weight.t(), out=buffer())
        if column == ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", name)
        return torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", name)

    return run


def gemm_reduce_scatter(column: str, pick: Pick, group: dist.ProcessGroup | None) -> Callable[[int], Tensor]:
    name = group_name(group)

    def run(i: int) -> Tensor:
        input, weight = pick(i)
        _check_even(input.shape[0], group)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(input, weight.t(), "sum", 0, name)

    return run


def all_gather_gemm(
    column: str, pick: Pick, group: dist.ProcessGroup | None, total_rows: int
) -> Callable[[int], Tensor]:
    name = group_name(group)

    def run(i: int) -> Tensor:
        input, weight = pick(i)
        _check_even(total_rows, group)
        _, [output] = torch.ops.symm_mem.fused_all_gather_matmul(input, [weight.t()], 0, name)
        return output

    return run


def _check_even(rows: int, group: dist.ProcessGroup | None) -> None:
    world = dist.get_world_size(group)
    if rows % world:
        raise ValueError(f"it takes rows that divide by the ranks only, and {rows} by {world} do not")
