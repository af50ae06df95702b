"""`gemm_all_reduce` on the host and baseline backends: its sums and gradients against float64, and which bits they have."""

import itertools

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import policy_cache
from fused_ops.backends.host.gemm_all_reduce import ONE_PHASE_BYTES
from fused_ops.gemm_all_reduce import gemm_all_reduce
from tests.fused_ops.gemm_reference import Problem, rank_and_world, tolerance
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEADING = ((), (0,), (1,), (2, 0, 3), (3,), (2, 4), (17,), (33,), (5, 13), (257,))
COLUMNS = (0, 1, 2, 19, 130)


def check(problem, comm, dtype, transposed=False, **options):
    """Output and gradients against float64, equal on all ranks, inputs unchanged."""
    rank, _ = rank_and_world()
    leaves = problem.leaves(rank, transposed)
    output = gemm_all_reduce(*leaves, comm=comm, **options)
    exact = problem.exact
    assert output.dtype == dtype
    assert output.shape == exact.shape
    torch.testing.assert_close(output.double(), exact, **tolerance(comm, dtype, problem.terms))
    assert torch.equal(leaves[0], problem.inputs[rank])
    assert torch.equal(leaves[1], problem.weights[rank])
    output.backward(problem.grad)
    for leaf, gradient in zip(leaves, problem.exact_gradients(rank), strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            torch.testing.assert_close(leaf.grad.double(), gradient, **tolerance("baseline", dtype, problem.terms))
    return output.detach()


def every_shape(comm):
    _, world = rank_and_world()
    for number, (leading, columns) in enumerate(itertools.product(LEADING, COLUMNS)):
        dtype = DTYPES[number % 3]
        even = [(number * 7) % 50] * world
        uneven = [(number * (r + 3)) % 41 for r in range(world)]
        uneven[number % world] = 0
        for inner in (even, uneven):
            problem = Problem.random(number, leading, columns, inner, dtype, bias=number % 2 == 0)
            check(problem, comm, dtype, transposed=number % 4 == 1)


@pytest.mark.parametrize(("world", "comm"), [(1, "host"), (2, "host"), (3, "host"), (3, "baseline")])
def test_shapes(world, comm):
    run_ranks(world, every_shape, comm)


def two_phases():
    """Outputs too large for one phase; more rows than columns and the other way round; neither divides by the world."""
    _, world = rank_and_world()
    for number, (rows, columns) in enumerate([(37, 5003), (1501, 301), (9001, 29), (40003, 2), (6, 40001)]):
        assert (world - 1) * 4 * rows * columns > ONE_PHASE_BYTES / 2
        for dtype in DTYPES:
            problem = Problem.random(number, (rows,), columns, [7 + 4 * r for r in range(world)], dtype)
            check(problem, "host", dtype, transposed=number % 2 == 1)


@pytest.mark.parametrize("world", [2, 3])
def test_large_outputs(world):
    run_ranks(world, two_phases)


def bits():
    """One problem gives the same bits on all ranks, in every call, whoever is late."""
    rank, world = rank_and_world()
    for rows, columns in ((1, 100), (5, 100), (40, 100), (300, 700)):
        for dtype in DTYPES:
            problem = Problem.random(rows, (rows,), columns, [301] * world, dtype)
            leaves = problem.leaves(rank)
            first = gemm_all_reduce(*leaves, comm="host").detach()
            context = fused_ops.symmetric.group.context(dist.group.WORLD.group_name)
            for lane in context.channels():
                lane.set_stress_delay(3000, 7 * rank + 1)
            others = [gemm_all_reduce(*leaves, comm="host").detach() for _ in range(5)]
            for lane in context.channels():
                lane.set_stress_delay(0, 1)
            assert all(torch.equal(first, other) for other in others)
            everywhere = [torch.empty_like(first) for _ in range(world)]
            dist.all_gather(everywhere, first)
            assert all(torch.equal(first, other) for other in everywhere)


def test_bitwise_repeatable_and_equal_on_all_ranks():
    run_ranks(3, bits)


def batch_of_one():
    """A row's result does not depend on how many rows come with it, among few."""
    rank, world = rank_and_world()
    for dtype in DTYPES:
        problem = Problem.random(3, (32,), 50, [1500] * world, dtype)
        input, weight, bias = (leaf.detach() for leaf in problem.leaves(rank))
        whole = gemm_all_reduce(input, weight, bias, comm="host")
        for first, last in ((0, 1), (3, 8), (10, 32)):
            assert torch.equal(gemm_all_reduce(input[first:last], weight, bias, comm="host"), whole[first:last])


def test_few_rows_do_not_depend_on_each_other():
    run_ranks(2, batch_of_one)


def strange_strides():
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(world, 40, 64, generator=generator)
    weights = torch.randn(world, 90, 64, generator=generator)
    for rows in (3, 40):
        pairs = {
            "every second column": (base[:, :rows, ::2], weights[:, :45, ::2]),
            "rows apart": (base[:, :rows, :32], weights[:, ::2, 32:]),
            "expanded": (base[:, :1, :32].expand(-1, rows, -1), weights[:, :1, :32].expand(-1, 45, -1)),
            "transposed": (base[:, :32, :rows].transpose(1, 2), weights[:, :32, :45].transpose(1, 2)),
            "one inner": (base[:, :rows, 5:6], weights[:, :45, 7:8]),
        }
        bias = torch.randn(90, generator=generator)[::2]
        for name, (inputs, all_weights) in pairs.items():
            exact = sum(i.double() @ w.double().t() for i, w in zip(inputs, all_weights, strict=True)) + bias.double()
            output = gemm_all_reduce(inputs[rank], all_weights[rank], bias, comm="host")
            torch.testing.assert_close(output.double(), exact, msg=name, **tolerance("host", torch.float32))


def test_any_strides():
    run_ranks(2, strange_strides)


def kept_results():
    """What was returned stays as it is, however many calls follow; in place it is the caller's."""
    rank, world = rank_and_world()
    kept = []
    for call in range(80):  # more than a channel has slots
        problem = Problem.random(call, (300,), 500, [3] * world, torch.float32)
        kept.append((gemm_all_reduce(*problem.leaves(rank), comm="host").detach(), problem.exact))
    for output, exact in kept:
        torch.testing.assert_close(output.double(), exact, **tolerance("host", torch.float32))
    kept[0][0].mul_(2)
    torch.testing.assert_close(kept[0][0].double(), 2 * kept[0][1], rtol=1e-5, atol=1e-4)


def test_results_are_the_callers():
    run_ranks(2, kept_results)


def special_values():
    """Infinities and NaN of one rank reach all ranks."""
    rank, _ = rank_and_world()
    for dtype in DTYPES:
        for rows in (2, 50):
            input, weight = torch.ones(rows, 40, dtype=dtype), torch.ones(30, 40, dtype=dtype)
            if rank == 1:
                input[0, 3], input[1, 5] = float("inf"), float("nan")
            output = gemm_all_reduce(input, weight, comm="host")
            assert bool(output[0].isinf().all())
            assert bool(output[1].isnan().all())
            assert bool((output[2:] == 80).all())


def test_special_values():
    run_ranks(2, special_values)


def what_ran(folder):
    rank, world = rank_and_world()
    policy_cache.cache_dir = lambda: folder
    problem = Problem.random(0, (4,), 6, [5] * world, torch.float32)
    fused_ops.reset_counters()
    gemm_all_reduce(*problem.leaves(rank), require_fused=True).sum().backward()
    gemm_all_reduce(*problem.leaves(rank), comm="baseline")
    assert fused_ops.counters() == {
        ("gemm_all_reduce", "host", "fused"): 1,
        ("gemm_all_reduce", "baseline", "asked for"): 1,
    }
    for _ in range(2):
        torch.testing.assert_close(
            gemm_all_reduce(*problem.leaves(rank), comm="auto").double(),
            problem.exact,
            **tolerance("host", torch.float32),
        )


def test_counted_and_chosen(tmp_path):
    run_ranks(2, what_ran, tmp_path)
