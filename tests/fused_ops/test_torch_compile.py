"""Under torch.compile every call runs, in order, and gradients are right; the registration passes torch's own checks."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from tests.ranks import run_ranks

CALLS = ("all_to_all", "host", "fused")


def exchange(input):
    return fused_ops.all_to_all(input)


def identical_calls(backend):
    """Five calls that a compiler would merge into one, two of them dead code, were they pure."""

    def function(x):
        kept = [exchange(x) for _ in range(3)]
        exchange(x)
        exchange(x)
        return sum(kept)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.arange(8.0).view(4, 2) + 10 * dist.get_rank()
    compiled(x)
    fused_ops.reset_counters()
    result = compiled(x)
    assert fused_ops.counters() == {CALLS: 5}
    assert torch.equal(result, function(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_identical_and_dead_calls_all_run(backend):
    run_ranks(2, identical_calls, backend, timeout=200)


def order_and_gradient(backend):
    """Rank 0 and rank 1 must issue different calls in one order: swapped, the shapes would disagree."""
    rank = dist.get_rank()

    def function(x):
        wide = fused_ops.all_to_all(x)
        narrow = fused_ops.all_to_all(x[:, :1] * 2)
        fused_ops.all_to_all(x[:2])
        return (wide.sin() * narrow).sum() + fused_ops.all_to_all(wide).pow(2).sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for seed in range(3):
        base = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * seed + rank))
        results = {}
        for name, run in (("eager", function), ("compiled", compiled)):
            leaf = base.clone().requires_grad_()
            fused_ops.reset_counters()
            loss = run(leaf)
            loss.backward()
            results[name] = (loss.detach(), leaf.grad)
            # Forward issues 4; backward one for each of the 3 results that the loss depends on.
            assert fused_ops.counters() == {CALLS: 7}, name
        torch.testing.assert_close(results["compiled"], results["eager"])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_order_and_gradient(backend):
    run_ranks(2, order_and_gradient, backend, timeout=200)


def uneven_and_dynamic():
    rank = dist.get_rank()
    table = [[1, 2], [3, 0]]
    send, receive = table[rank], [table[s][rank] for s in range(2)]

    def function(x):
        return fused_ops.all_to_all(x, output_splits=receive, input_splits=send) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for width in (2, 3, 5):
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(rank))
        assert torch.equal(compiled(x), function(x))


def test_uneven_splits_and_dynamic_shapes():
    run_ranks(2, uneven_and_dynamic, timeout=200)


def registration():
    name = dist.group.WORLD.group_name
    operator = torch.ops.fused_ops.all_to_all.default
    samples = [
        (torch.randn(3, 2, requires_grad=True), None, None),
        (torch.randn(4, 2, requires_grad=True), [4], [4]),
        (torch.randn(0, 2), [0], [0]),
        (torch.arange(3), None, None),
    ]
    for input, receive, send in samples:
        for comm in ("host", "baseline"):
            torch.library.opcheck(operator, (input, receive, send, name, 0, comm, False))


def test_opcheck():
    run_ranks(1, registration, timeout=200)
