"""The GEMM operators under torch.compile: every call runs, gradients are right; the registration passes torch's own checks."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from tests.ranks import run_ranks


def gather(input, weight):
    return all_gather_gemm(input, weight, total_rows=2 * input.shape[0])


OPERATORS = {"gemm_all_reduce": gemm_all_reduce, "gemm_reduce_scatter": gemm_reduce_scatter, "all_gather_gemm": gather}


def operands():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 3, generator=generator), torch.randn(5, 3, generator=generator)


def identical_calls(backend):
    """Five calls of each that a compiler would merge into one, two of them dead code, were they pure."""

    def function(input, weight):
        results = []
        for operator in OPERATORS.values():
            kept = [operator(input, weight) for _ in range(3)]
            operator(input, weight)
            operator(input, weight)
            results.append(sum(kept))
        return results

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    arguments = operands()
    compiled(*arguments)
    fused_ops.reset_counters()
    results = compiled(*arguments)
    assert fused_ops.counters() == {(name, "host", "fused"): 5 for name in OPERATORS}
    for result, eager in zip(results, function(*arguments), strict=True):
        assert torch.equal(result, eager)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_identical_and_dead_calls_all_run(backend):
    run_ranks(2, identical_calls, backend, timeout=200)


def chained_gradient(backend):
    """A column- and a row-parallel linear, with sequence parallelism and without."""

    def function(input, up, down, bias):
        columns = all_gather_gemm(input, up, total_rows=7, save_gathered=False)
        rows = gemm_reduce_scatter(columns.relu(), down, bias)
        return rows.pow(2).sum() + gemm_all_reduce(columns, down, bias).sin().sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    rank = dist.get_rank()
    for seed in range(2):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        shapes = [(4 - rank, 6), (5, 6), (6, 5), (6,)]
        base = [torch.randn(shape, generator=generator) for shape in shapes]
        results = {}
        for name, run in (("eager", function), ("compiled", compiled)):
            leaves = [tensor.clone().requires_grad_() for tensor in base]
            loss = run(*leaves)
            loss.backward()
            results[name] = [loss.detach(), *(leaf.grad for leaf in leaves)]
        torch.testing.assert_close(results["compiled"], results["eager"])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradient_of_chained_operators(backend):
    run_ranks(2, chained_gradient, backend, timeout=200)


def dynamic_rows():
    def function(input, weight):
        full = gemm_all_reduce(input, weight)
        scattered = gemm_reduce_scatter(input, weight)
        return full * 2, all_gather_gemm(scattered, weight.t(), total_rows=input.shape[0])

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    _, weight = operands()
    for rows in (2, 3, 7):
        input = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        for result, eager in zip(compiled(input, weight), function(input, weight), strict=True):
            assert torch.equal(result, eager)


def test_dynamic_rows():
    run_ranks(2, dynamic_rows, timeout=200)


def registration():
    options = (dist.group.WORLD.group_name, 0, "host", False)
    operators = torch.ops.fused_ops
    input, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    samples = [(input, weight, bias), (input, weight.detach(), None), (torch.randn(0, 3), weight, bias)]
    for sample in samples:
        rows = sample[0].shape[0]
        torch.library.opcheck(operators.gemm_all_reduce.default, (*sample, *options))
        torch.library.opcheck(operators.gemm_reduce_scatter.default, (*sample, *options))
        for keep, save in ((True, True), (True, False), (False, False)):
            torch.library.opcheck(operators.all_gather_gemm.default, (*sample, rows, keep, save, *options))
    torch.library.opcheck(operators.gemm_all_reduce.default, (torch.randn(2, 4, 3), weight, bias, *options))
    torch.library.opcheck(operators.all_gather_gemm.default, (input, weight, bias, None, True, True, *options))


def test_opcheck():
    run_ranks(1, registration, timeout=200)
