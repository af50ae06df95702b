"""The operators of Mixture of Experts under torch.compile: every call runs, gradients are right; torch's own checks pass."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.all_to_all_gemm import all_to_all_gemm
from fused_ops.gemm_all_to_all import gemm_all_to_all
from tests.fused_ops.moe_reference import MoeProblem, rank_and_world
from tests.ranks import run_ranks


def layer(input, up, down, gates, tokens, counts):
    inner, _, received = all_to_all_gemm(input, up, tokens, counts)
    return gemm_all_to_all(inner.relu(), down, received, tokens, counts, gates, input.shape[0])


def compiled_layer(backend, whole_graph):
    """The same call twice, which a compiler would merge were it pure, once of them dead; then other sizes."""

    def function(*arguments):
        layer(*arguments)
        return layer(*arguments)

    torch._dynamo.config.capture_scalar_outputs = whole_graph
    compiled = torch.compile(function, backend=backend, fullgraph=whole_graph, dynamic=True)
    rank, world = rank_and_world()
    for seed, tokens in enumerate(([9, 14], [8, 7])):
        problem = MoeProblem.random(seed, tokens, 2 * world, 2, (6, 10), torch.float32)
        mine = problem.mine(rank)
        parts = [problem.inputs[rank], problem.up[mine], problem.down[mine], problem.gates[rank]]
        results = {}
        for name, run in (("eager", function), ("compiled", compiled)):
            leaves = [part.clone().requires_grad_() for part in parts]
            fused_ops.reset_counters()
            output = run(*leaves, problem.tokens[rank], problem.counts(rank))
            assert fused_ops.counters() == {
                (operator, "host", "fused"): 2
                for operator in ("all_to_all_gemm_counts", "all_to_all_gemm", "gemm_all_to_all")
            }
            output.backward(problem.grads[rank])
            results[name] = [output.detach(), *(leaf.grad for leaf in leaves)]
        torch.testing.assert_close(results["compiled"], results["eager"])


@pytest.mark.parametrize(("backend", "whole_graph"), [("eager", False), ("inductor", True)])
def test_compiled(backend, whole_graph):
    run_ranks(2, compiled_layer, backend, whole_graph, timeout=200)


def registration():
    options = (dist.group.WORLD.group_name, 0, "host", False)
    operators = torch.ops.fused_ops
    for tokens in ([5], [0]):
        problem = MoeProblem.random(1, tokens, 3, 2, (4, 6), torch.float32)
        up, down, gates = (part.requires_grad_() for part in (problem.up, problem.down, problem.gates[0]))
        input, routing = problem.inputs[0].requires_grad_(), (problem.tokens[0], problem.counts(0))
        rows = len(problem.tokens[0])
        counts = routing[1]
        torch.library.opcheck(operators.all_to_all_gemm_counts.default, (counts, torch.device("cpu"), *options))
        sent = (input, up, routing[0], counts.unsqueeze(0), rows)
        torch.library.opcheck(operators.all_to_all_gemm.default, (*sent, *options))
        products = torch.randn(rows, 6, requires_grad=True)
        for keep in (True, False):
            arguments = (
                products,
                down,
                problem.received(0),
                *routing,
                gates if keep else gates.detach(),
                tokens[0],
                keep,
            )
            torch.library.opcheck(operators.gemm_all_to_all.default, (*arguments, *options))
        torch.library.opcheck(
            operators.grouped_weight_gradient.default, (torch.randn(rows, 4), torch.randn(rows, 6), problem.received(0))
        )


def test_opcheck():
    run_ranks(1, registration, timeout=200)
