"""What autograd may do with `embedding_all_to_all` beyond one forward and one backward."""

import itertools

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.ranks import run_ranks

BACKENDS = ["host", "unfused", "baseline"]


def inputs():
    """(table, indices, offsets, layout) and the gradient of the output's sum, averaged over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[4]] * world, [2] * world)
    generator = torch.Generator().manual_seed(rank)
    table = torch.randn(20, 4, generator=generator)
    indices = torch.randint(0, 20, (4 * world,), generator=generator)
    counts = torch.bincount(indices, minlength=20).float() / world
    return (table, indices, torch.arange(2 * world + 1) * 2, layout), counts[:, None].expand(-1, 4)


def backwards():
    for comm in BACKENDS:
        (table, *rest), expected = inputs()
        table.requires_grad_()
        total = fused_ops.embedding_all_to_all([table], *rest, comm=comm).sum()
        total.backward(retain_graph=True)
        total.backward()
        torch.testing.assert_close(table.grad, 2 * expected)
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()

        (table, *rest), expected = inputs()
        before = table.clone()
        total = fused_ops.embedding_all_to_all([table], *rest, optimizer=FusedOptimizer("sgd", 1.0), comm=comm).sum()
        total.backward(retain_graph=True)
        total.backward()
        torch.testing.assert_close(table, before - 2 * expected)

        for order in itertools.permutations(range(2)):
            (table, *rest), expected = inputs()
            table.requires_grad_()
            totals = [fused_ops.embedding_all_to_all([table], *rest, comm=comm).sum() for _ in range(2)]
            for i in order:
                totals[i].backward()
            torch.testing.assert_close(table.grad, 2 * expected)


def test_two_backwards_of_one_call_and_of_two_in_either_order():
    run_ranks(2, backwards)


def refusals():
    for comm in BACKENDS:
        for weighted in (False, True):
            (table, *rest), _ = inputs()
            table.requires_grad_()
            weights = torch.ones(len(rest[0])).requires_grad_() if weighted else None
            output = fused_ops.embedding_all_to_all([table], *rest, per_sample_weights=weights, comm=comm)
            (grad,) = torch.autograd.grad(output.square().sum(), table, create_graph=True)
            with pytest.raises(RuntimeError, match="embedding_all_to_all: its backward cannot be differentiated again"):
                grad.square().sum().backward()

        (table, indices, *rest), _ = inputs()
        output = fused_ops.embedding_all_to_all([table.requires_grad_()], indices, *rest, comm=comm)
        indices.fill_(999)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_second_derivative_and_changed_indices_are_refused():
    run_ranks(2, refusals)


def modes():
    for comm in BACKENDS:
        (table, *rest), expected = inputs()
        table.requires_grad_()
        seen = []
        table.register_hook(lambda grad: seen.append("table") or 2 * grad)  # noqa: B023
        with torch.autocast("cpu", torch.bfloat16):
            output = fused_ops.embedding_all_to_all([table], *rest, comm=comm)
        output.register_hook(lambda grad: seen.append("output") or 3 * grad)  # noqa: B023
        assert output.dtype == torch.float32
        output.sum().backward()
        assert seen == ["output", "table"]
        torch.testing.assert_close(table.grad, 6 * expected)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                again = fused_ops.embedding_all_to_all([table], *rest, comm=comm)
            assert not again.requires_grad
            assert torch.equal(again, output)


def test_hooks_autocast_and_no_grad():
    run_ranks(2, modes)
