"""`all_gather_gemm` on the host and baseline backends: outputs, gathered inputs and gradients, against float64."""

import itertools

import pytest
import torch

import fused_ops
import fused_ops.gemm_reduce_scatter
from fused_ops import policy_cache
from fused_ops.all_gather_gemm import all_gather_gemm
from tests.fused_ops.gemm_reference import rank_and_world, rows_of, tolerance
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(seed, rows, inner, columns, dtype, comm, transposed=False, with_bias=True, given=True, **options):
    """Output, gathered input and gradients against float64; columns: N_r of every rank. Inputs stay unchanged."""
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    input = values(rows, inner)
    weights, biases = [values(n, inner) for n in columns], [values(n) for n in columns]
    grads, gathered_grads = [values(rows, n) for n in columns], [values(rows, inner) for _ in columns]
    mine = rows_of(rows, world, rank)
    leaf = input[mine].clone().requires_grad_()
    weight = weights[rank].t().contiguous().t() if transposed else weights[rank].clone()
    weight.requires_grad_()
    bias = biases[rank].clone().requires_grad_() if with_bias else None
    result = all_gather_gemm(leaf, weight, bias, total_rows=rows if given else None, comm=comm, **options)
    output, gathered = result if options.get("return_gathered") else (result, None)
    terms = max(inner, rows, sum(columns))
    exact = input.double() @ weights[rank].double().t() + (biases[rank].double() if with_bias else 0)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), exact, **tolerance("baseline", dtype, terms))
    assert torch.equal(leaf, input[mine])
    sources, gradients = [output], [grads[rank]]
    want = sum(grad.double() @ other.double() for grad, other in zip(grads, weights, strict=True))
    if gathered is not None:
        assert torch.equal(gathered, input)
        sources, gradients = [output, gathered], [grads[rank], gathered_grads[rank]]
        want = want + sum(grad.double() for grad in gathered_grads)
    torch.autograd.backward(sources, gradients)
    limits = tolerance("baseline", dtype, terms)
    torch.testing.assert_close(leaf.grad.double(), want[mine], **limits)
    torch.testing.assert_close(weight.grad.double(), grads[rank].double().t() @ input.double(), **limits)
    if bias is not None:
        torch.testing.assert_close(bias.grad.double(), grads[rank].double().sum(0), **limits)
    assert leaf.grad.dtype == weight.grad.dtype == dtype


def every_shape(comm):
    _, world = rank_and_world()
    choices = itertools.product((False, True), (False, True), (False, True))
    options = [
        {"return_gathered": returned, "save_gathered": saved, "given": given} for returned, saved, given in choices
    ]
    shapes = itertools.product((0, 1, 2, 5, 8, 33), (0, 1, 30), ([0, 7, 3], [16, 16, 16], [1, 0, 65]))
    for number, (rows, inner, columns) in enumerate(shapes):
        dtype = DTYPES[number % 3]
        chosen = options[number % len(options)]
        check(number, rows, inner, columns[:world], dtype, comm, number % 4 == 1, number % 2 == 0, **chosen)


@pytest.mark.parametrize(("world", "comm"), [(1, "host"), (2, "host"), (3, "host"), (1, "baseline"), (3, "baseline")])
def test_shapes(world, comm):
    run_ranks(world, every_shape, comm)


def every_option(comm):
    for number, (returned, saved, given) in enumerate(itertools.product((False, True), repeat=3)):
        options = {"return_gathered": returned, "save_gathered": saved, "given": given}
        check(number, 7, 12, [5, 6], torch.float32, comm, **options)


@pytest.mark.parametrize("comm", ["host", "baseline"])
def test_options(comm):
    run_ranks(2, every_option, comm)


def large():
    for dtype in DTYPES:
        check(1, 1001, 333, [200, 100, 77], dtype, "host")


def test_large():
    run_ranks(3, large)


def exchanges_of_saving():
    """What is kept is not gathered again; and only where the weight wants a gradient is anything gathered again."""
    rank, _ = rank_and_world()
    for saved, wanted, gathers in ((True, True, 1), (False, True, 2), (False, False, 1)):
        input = torch.ones(2, 3, requires_grad=True)
        weight = torch.ones(4, 3, requires_grad=wanted)
        fused_ops.reset_counters()
        all_gather_gemm(input, weight, total_rows=4, save_gathered=saved, comm="host").sum().backward()
        assert fused_ops.counters() == {
            ("all_gather_gemm", "host", "asked for"): gathers,
            ("gemm_reduce_scatter", "host", "asked for"): 1,
        }
    # Only the gathered input is used: its gradient alone goes back.
    input = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    weight = torch.ones(4, 3, requires_grad=True)
    _, gathered = all_gather_gemm(input, weight, total_rows=4, return_gathered=True, comm="host")
    (gathered * (rank + 1)).sum().backward()
    assert torch.equal(input.grad, torch.full((2, 3), 3.0))
    assert weight.grad is None


def test_saved_or_gathered_again():
    run_ranks(2, exchanges_of_saving)


def wrong_splits(comm):
    rank, _ = rank_and_world()
    weight = torch.ones(4, 3)
    # Ranks ask each other: all learn of it.
    with pytest.raises(ValueError, match=r"ranks have \[3, 1\] rows, but 4 rows over 2 ranks must be split \[2, 2\]"):
        all_gather_gemm(torch.ones(1 if rank else 3, 3), weight, comm=comm)
    with pytest.raises(ValueError, match=r"ranks have \[1, 2\] rows"):
        all_gather_gemm(torch.ones(1 + rank, 3), weight, comm=comm)
    with pytest.raises(ValueError, match=r"of 5 rows rank . of 2 has [32], but its input has 1"):
        all_gather_gemm(torch.ones(1, 3), weight, total_rows=5, comm=comm)
    with pytest.raises(ValueError, match="must not be negative"):
        all_gather_gemm(torch.ones(0, 3), weight, total_rows=-1, comm=comm)
    check(1, 5, 3, [4, 4], torch.float32, comm)


@pytest.mark.parametrize("comm", ["host", "baseline"])
def test_rows_that_are_not_split_evenly(comm):
    run_ranks(2, wrong_splits, comm)


def what_ran(folder):
    policy_cache.cache_dir = lambda: folder
    fused_ops.reset_counters()
    input, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    all_gather_gemm(input, weight, total_rows=4, require_fused=True).sum().backward()
    assert fused_ops.counters() == {
        ("all_gather_gemm", "host", "fused"): 1,
        ("gemm_reduce_scatter", "host", "fused"): 1,
    }
    for given in (True, False):
        for _ in range(2):
            check(3, 9, 8, [5, 6], torch.float32, "auto", given=given)


def test_counted_and_chosen(tmp_path):
    run_ranks(2, what_ran, tmp_path)
