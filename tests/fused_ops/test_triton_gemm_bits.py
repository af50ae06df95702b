"""The GEMM operators in Triton: one call's bits are those of the next, and what was returned stays as it is."""

import pytest
import torch

import fused_ops
from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from fused_ops.symmetric import device_arenas
from fused_ops.symmetric.group import context, group_name
from tests.fused_ops.gemm_reference import Problem, rank_and_world, rows_of
from tests.fused_ops.test_triton_gemm import in_two_phases, on
from tests.fused_ops.triton_ranks import DEVICES, run_triton_ranks

pytestmark = pytest.mark.parametrize("device", DEVICES)


def same_bits(device):
    """In every call, whoever is late and however many programs there are; no later call changes what is held."""
    rank, world = rank_and_world()
    problem = Problem.random(5, (66,), 70, [33, 64], torch.bfloat16)
    input, weight, bias = on(device, [leaf.detach() for leaf in problem.leaves(rank)])
    in_two_phases()
    square = input[rows_of(66, world, rank), :32].contiguous()
    calls = [
        lambda: gemm_reduce_scatter(input, weight, bias, comm="triton"),
        lambda: gemm_all_reduce(input, weight, bias, comm="triton"),
        lambda: torch.cat(all_gather_gemm(square, square, total_rows=66, return_gathered=True, comm="triton"), dim=1),
    ]
    first = [call() for call in calls]
    copies = [output.clone() for output in first]
    (lane,) = context(group_name(None)).channels()
    for delay in (2000, 0):
        lane.set_stress_delay(delay, rank)
        fused_ops.set_num_sms(1 if delay else None)
        assert all(torch.equal(call(), copy) for call, copy in zip(calls, copies, strict=True))
    fused_ops.check_errors()
    assert all(torch.equal(output, copy) for output, copy in zip(first, copies, strict=True))


def held_outputs(device):
    """More outputs alive than there are slots, of sizes that grow."""
    rank, world = rank_and_world()
    in_two_phases()
    device_arenas.slots_of = lambda size: 3
    held = []
    for columns in (20, 600, 20, 21, 24):  # the arena grows; what is held keeps slots of the larger one
        step = len(held)
        ones = torch.ones(4, 2, device=device), torch.full((columns, 2), float(step + rank), device=device)
        summed = gemm_all_reduce(*ones, comm="triton")
        _, gathered = all_gather_gemm(
            torch.full((2, columns), float(step + rank), device=device), ones[1].new_ones(3, columns),
            total_rows=2 * world, return_gathered=True, comm="triton",
        )  # fmt: skip
        assert (summed == 2 * sum(step + r for r in range(world))).all()
        assert gathered[:, 0].tolist() == [float(step + r) for r in range(world) for _ in range(2)]
        held += [(summed, summed.clone()), (gathered, gathered.clone())]
    fused_ops.check_errors()
    assert all(torch.equal(output, copy) for output, copy in held)


def bits(device):
    held_outputs(device)
    same_bits(device)


def test_bits_do_not_depend_on_run_or_later_calls(device):
    run_triton_ranks(2, device, bits)
