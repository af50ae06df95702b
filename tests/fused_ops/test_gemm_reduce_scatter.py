"""`gemm_reduce_scatter` on the host and baseline backends: this rank's rows of the sums, and gradients, against float64."""

import itertools

import pytest
import torch

import fused_ops
import fused_ops.all_gather_gemm
from fused_ops import policy_cache
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from tests.fused_ops.gemm_reference import Problem, rank_and_world, rows_of, tolerance
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 8, 17, 33, 100)
COLUMNS = (0, 1, 19, 130)


def check(problem, comm, dtype, transposed=False, wants=(True, True, True)):
    """Output and gradients against float64; inputs unchanged. `wants`: which of input, weight and bias want a gradient."""
    rank, world = rank_and_world()
    leaves = [
        leaf if leaf is None else leaf.requires_grad_(wanted)
        for leaf, wanted in zip(problem.leaves(rank, transposed), wants, strict=True)
    ]
    output = gemm_reduce_scatter(*leaves, comm=comm)
    mine = rows_of(problem.grad.shape[0], world, rank)
    exact = problem.exact[mine]
    assert output.dtype == dtype
    assert output.shape == exact.shape
    torch.testing.assert_close(output.double(), exact, **tolerance(comm, dtype, problem.terms))
    assert torch.equal(leaves[0], problem.inputs[rank])
    if not any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return
    output.backward(problem.grad[mine])
    for leaf, gradient in zip(leaves, problem.exact_gradients(rank), strict=True):
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad.dtype == dtype
            torch.testing.assert_close(leaf.grad.double(), gradient, **tolerance("baseline", dtype, problem.terms))
        elif leaf is not None:
            assert leaf.grad is None


def every_shape(comm):
    _, world = rank_and_world()
    for number, (rows, columns) in enumerate(itertools.product(ROWS, COLUMNS)):
        dtype = DTYPES[number % 3]
        even = [(number * 7) % 50] * world
        uneven = [(number * (r + 3)) % 41 for r in range(world)]
        uneven[number % world] = 0
        for inner in (even, uneven):
            problem = Problem.random(number, (rows,), columns, inner, dtype, bias=number % 2 == 0)
            check(problem, comm, dtype, transposed=number % 4 == 1)


@pytest.mark.parametrize(("world", "comm"), [(1, "host"), (2, "host"), (3, "host"), (1, "baseline"), (3, "baseline")])
def test_shapes(world, comm):
    run_ranks(world, every_shape, comm)


def some_gradients(comm):
    _, world = rank_and_world()
    for number, wants in enumerate(itertools.product((False, True), repeat=3)):
        check(Problem.random(number, (11,), 6, [4] * world, torch.float32), comm, torch.float32, wants=wants)


@pytest.mark.parametrize("comm", ["host", "baseline"])
def test_where_some_want_no_gradient(comm):
    run_ranks(2, some_gradients, comm)


def large():
    rank, world = rank_and_world()
    for dtype in DTYPES:
        check(Problem.random(1, (1001,), 777, [65, 64, 63][:world], dtype), "host", dtype)
    problem = Problem.random(2, (50,), 64, [100] * world, torch.float32)
    leaves = [leaf.detach() for leaf in problem.leaves(rank)]
    first = gemm_reduce_scatter(*leaves, comm="host")
    kept = first.clone()
    assert all(torch.equal(gemm_reduce_scatter(*leaves, comm="host"), first) for _ in range(10))
    assert torch.equal(first, kept)


def test_large_and_bitwise_repeatable():
    run_ranks(3, large)


def what_ran(folder):
    rank, world = rank_and_world()
    policy_cache.cache_dir = lambda: folder
    problem = Problem.random(0, (5,), 6, [5] * world, torch.float32)
    fused_ops.reset_counters()
    gemm_reduce_scatter(*problem.leaves(rank), require_fused=True).sum().backward()
    assert fused_ops.counters() == {
        ("gemm_reduce_scatter", "host", "fused"): 1,
        ("all_gather_gemm", "host", "fused"): 1,
    }
    for _ in range(2):
        check(problem, "auto", torch.float32)


def test_counted_and_chosen(tmp_path):
    run_ranks(2, what_ran, tmp_path)
