"""`gemm_all_to_all` on the host and baseline backends: sums at home and all gradients against float64; a whole layer."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import policy_cache
from fused_ops.all_to_all_gemm import all_to_all_gemm
from fused_ops.gemm_all_to_all import gemm_all_to_all
from fused_ops.symmetric.group import context
from tests.fused_ops.moe_reference import MoeProblem, assert_rounded, rank_and_world
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hidden_rows(problem):
    """Of each rank the input row of each routed row: what an activation might have made of it."""
    generator = torch.Generator().manual_seed(1)
    shape, dtype = problem.up.shape, problem.up.dtype
    return [torch.randn(len(tokens), shape[1], generator=generator).to(dtype) for tokens in problem.tokens]


def leaves_of(problem, rank, transposed=False):
    weight = problem.down[problem.mine(rank)]
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight.clone()
    input = problem.dispatched(rank, hidden_rows(problem))
    return input.requires_grad_(), weight.requires_grad_(), problem.gates[rank].clone().requires_grad_()


def check(problem, comm, transposed=False, **options):
    """Output and gradients against float64, inputs unchanged."""
    rank, world = rank_and_world(options.get("group"))
    input, weight, gates = leaves_of(problem, rank, transposed)
    num_tokens, dtype, terms = len(problem.inputs[rank]), input.dtype, problem.most_rows_of_a_token(rank)
    routing = problem.received(rank), problem.tokens[rank].clone(), problem.counts(rank)
    kept = [tensor.detach().clone() for tensor in (input, weight, gates, *routing)]
    output = gemm_all_to_all(input, weight, *routing, gates, num_tokens, comm=comm, **options)
    down, rows, grads = problem.down.double(), hidden_rows(problem), problem.grads
    hidden, inner = down.shape[1:]
    products = torch.einsum("rf,rhf->rh", rows[rank].double(), down[problem.experts_of[rank]])
    exact = problem.combine(rank, products, problem.gates[rank])
    assert output.dtype == dtype
    assert_rounded(
        output, exact, inner * terms, problem.combine(rank, products.abs(), problem.gates[rank].double().abs())
    )

    output.backward(grads[rank])
    assert (input.grad.dtype, weight.grad.dtype, gates.grad.dtype) == (dtype, dtype, gates.dtype)
    home = grads[rank].double()[problem.tokens[rank]]
    assert_rounded(gates.grad, (products * home).sum(1), inner * hidden, (products * home).abs().sum(1), dtype)
    weighted = [grads[r].double()[problem.tokens[r]] * problem.gates[r].double().unsqueeze(1) for r in range(world)]
    at_experts = problem.dispatched(rank, weighted)
    expert_of_row = problem.dispatched(rank, problem.experts_of)
    by_weight = at_experts.unsqueeze(1) @ down[expert_of_row] if len(at_experts) else torch.zeros(0, 1, inner)
    magnitudes = at_experts.abs().unsqueeze(1) @ down[expert_of_row].abs() if len(at_experts) else by_weight
    assert_rounded(input.grad, by_weight.squeeze(1).double(), hidden, magnitudes.squeeze(1).double())
    start = 0
    for expert, count in enumerate(problem.received(rank).sum(1).tolist()):
        part = slice(start, start + count)
        sent, mine = at_experts[part], kept[0][part].double()
        assert_rounded(weight.grad[expert], sent.t() @ mine, count, sent.abs().t() @ mine.abs())
        assert count or not weight.grad[expert].any()
        start += count
    assert all(torch.equal(now, before) for now, before in zip((input, weight, gates, *routing), kept, strict=True))


def every_shape(comm):
    _, world = rank_and_world()
    number = 0
    for experts_a_rank, top_k in ((1, 1), (2, 2), (3, 1), (16, 16)):
        for sizes in ((1, 1), (7, 5), (33, 130), (64, 32)):
            number += 1
            tokens = [(number * (rank + 5)) % 40 for rank in range(world)]
            tokens[number % world] = 0 if number % 3 == 0 else 9
            experts = experts_a_rank * world
            top_k = min(top_k, experts)
            dtype = DTYPES[number % 3]
            gates_dtype = torch.float32 if number % 2 else dtype
            dropped = 0.3 * (number % 2)
            problem = MoeProblem.random(
                number, tokens, experts, top_k, sizes, dtype, dropped=dropped, gates_dtype=gates_dtype
            )
            check(problem, comm, transposed=number % 4 == 1)


@pytest.mark.parametrize(("world", "comm"), [(1, "host"), (2, "host"), (4, "host"), (3, "baseline")])
def test_shapes(world, comm):
    run_ranks(world, every_shape, comm)


def special_routings(comm):
    _, world = rank_and_world()
    experts = 4 * world
    for dtype in DTYPES:
        check(MoeProblem.random(1, [50] * world, experts, 1, (9, 6), dtype, allowed=[experts - 1]), comm)
        check(MoeProblem.random(2, [50] * world, experts, 2, (9, 6), dtype, allowed=[0, 1, 3]), comm)
        check(MoeProblem.random(3, [0] * world, experts, 2, (9, 6), dtype), comm)
        check(MoeProblem.random(4, [20] * world, experts, 2, (9, 6), dtype, dropped=1.0), comm)
        check(MoeProblem.random(5, [0] * (world - 1) + [30], experts, 2, (9, 6), dtype), comm)
        check(MoeProblem.random(6, [11] * world, experts, 2, (5, 0), dtype), comm)
        check(MoeProblem.random(7, [11] * world, experts, 2, (0, 5), dtype), comm)
    check(MoeProblem.random(8, [60, 3, 40][:world], 128 // world * world, 16, (17, 3), torch.float32), comm)


@pytest.mark.parametrize(("world", "comm"), [(2, "host"), (2, "baseline"), (3, "host")])
def test_routings(world, comm):
    run_ranks(world, special_routings, comm)


def many_rows():
    """Experts with so many rows that each rank's products are computed in its memory, beside experts with few."""
    _, world = rank_and_world()
    for dtype in DTYPES:
        check(MoeProblem.random(1, [1500, 900, 700][:world], 2 * world, 1, (24, 19), dtype, allowed=[1]), "host")
        check(MoeProblem.random(2, [2500, 2000, 10][:world], 2 * world, 1, (24, 19), dtype, allowed=[0, 3]), "host")


@pytest.mark.parametrize("world", [2, 3])
def test_many_rows(world):
    run_ranks(world, many_rows)


def once(problem, rank, leaves):
    """Output and gradients."""
    input, weight, gates = leaves
    routing = problem.received(rank), problem.tokens[rank], problem.counts(rank)
    output = gemm_all_to_all(input, weight, *routing, gates, len(problem.inputs[rank]), comm="host")
    return output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)


def bits():
    """One problem gives the same bits in every call, whoever is late."""
    rank, world = rank_and_world()
    for tokens in (30, 1100):
        for dtype in DTYPES:
            allowed = None if tokens == 30 else [0, 1, 3]
            problem = MoeProblem.random(3, [tokens] * world, 2 * world, 2, (61, 40), dtype, allowed)
            leaves = leaves_of(problem, rank)
            first = once(problem, rank, leaves)
            lanes = context(dist.group.WORLD.group_name).channels()
            for lane in lanes:
                lane.set_stress_delay(3000, 7 * rank + 1)
            for _ in range(4):
                assert all(torch.equal(a, b) for a, b in zip(first, once(problem, rank, leaves), strict=True))
            for lane in lanes:
                lane.set_stress_delay(0, 1)


def test_bitwise_repeatable():
    run_ranks(3, bits)


def added_in_order():
    """Products of whole numbers show in which order, and in what precision, a token's are added, and that others are not."""
    rank, world = rank_and_world()
    dtype = torch.float16
    # One token, routed to every expert; expert e's product is weights[e], and the gates are one.
    weights = [2048.0, 1.0, -2048.0, 1.0]
    experts, mine = len(weights), len(weights) // world
    weight = torch.tensor(weights, dtype=dtype)[rank * mine : (rank + 1) * mine].view(mine, 1, 1)
    input = torch.ones(mine * world, 1, dtype=dtype)
    received = torch.ones(mine, world, dtype=torch.int64)
    tokens, counts = torch.full((experts,), 1), torch.ones(experts, dtype=torch.int64)
    output = gemm_all_to_all(input, weight, received, tokens, counts, torch.ones(experts), 3, comm="host")
    assert output.tolist() == [[0.0], [2.0], [0.0]]  # float16 sums would be 2048 + 1 - 2048 + 1 = 1


def test_sums_are_float32():
    run_ranks(2, added_in_order)


def special_values():
    """Infinities and NaN reach the tokens that were routed to them, and no other."""
    rank, world = rank_and_world()
    for dtype in DTYPES:
        problem = MoeProblem.random(1, [20] * world, 2 * world, 1, (20, 6), dtype)
        input, weight, gates = (leaf.detach() for leaf in leaves_of(problem, rank))
        if rank == 1:
            weight[0] = float("nan")
        routing = problem.received(rank), problem.tokens[rank], problem.counts(rank)
        output = gemm_all_to_all(input, weight, *routing, gates, 20, comm="host")
        hit = torch.zeros(20, dtype=torch.bool)
        hit[problem.tokens[rank][problem.experts_of[rank] == 2]] = True
        assert torch.equal(output.isnan().all(1), hit)
        assert torch.equal(output.isnan().any(1), hit)


def test_special_values():
    run_ranks(2, special_values)


def kept_results():
    """What was returned, and what autograd keeps, stays as it is however many calls follow."""
    rank, world = rank_and_world()
    kept = []
    for call in range(80):  # more than a channel has slots
        problem = MoeProblem.random(call, [40] * world, world, 1, (6, 3), torch.float32)
        leaves = leaves_of(problem, rank)
        routing = problem.received(rank), problem.tokens[rank], problem.counts(rank)
        output = gemm_all_to_all(*leaves[:2], *routing, leaves[2], 40, comm="host")
        kept.append((problem, leaves, output))
    for problem, leaves, output in kept:
        products = torch.einsum(
            "rf,rhf->rh", hidden_rows(problem)[rank].double(), problem.down.double()[problem.experts_of[rank]]
        )
        assert_rounded(output.detach(), problem.combine(rank, products, problem.gates[rank]), 3)
        output.sum().backward()
        assert_rounded(leaves[2].grad, products.sum(1), 3)


def test_results_are_the_callers():
    run_ranks(2, kept_results)


def layer(problem, rank, parts, comm, **options):
    """The whole layer with its activation; the leaves get gradients."""
    input, up, down, gates = parts
    routing = problem.tokens[rank], problem.counts(rank)
    inner, _, received = all_to_all_gemm(input, up, *routing, comm=comm, **options)
    return gemm_all_to_all(torch.tanh(inner), down, received, *routing, gates, len(input), comm=comm, **options)


def whole_layer(comm):
    """Against one process in float64; every other channel at once."""
    rank, world = rank_and_world()
    for seed, tokens in enumerate(([9, 14, 0, 5], [0, 0, 0, 7], [31, 1, 30, 2])):
        problem = MoeProblem.random(seed, tokens[:world], 2 * world, 2, (6, 10), torch.float32, dropped=0.1)
        exact = [
            *[part.double() for part in problem.inputs],
            problem.up.double(),
            problem.down.double(),
            *[part.double() for part in problem.gates],
        ]
        exact = [tensor.requires_grad_() for tensor in exact]
        outputs = []
        for r in range(world):
            experts, rows = problem.experts_of[r], exact[r][problem.tokens[r]]
            inner = torch.tanh(torch.einsum("rh,rfh->rf", rows, exact[world][experts]))
            products = torch.einsum("rf,rhf->rh", inner, exact[world + 1][experts])
            outputs.append(problem.combine(r, products, exact[world + 2 + r]))
        sum((output * grad).sum() for output, grad in zip(outputs, problem.grads, strict=True)).backward()

        mine = problem.mine(rank)
        calls = []
        for channel in (0, 1):
            parts = [problem.inputs[rank], problem.up[mine], problem.down[mine], problem.gates[rank]]
            leaves = [part.clone().requires_grad_() for part in parts]
            calls.append((leaves, layer(problem, rank, leaves, comm, channel=channel)))
        for leaves, output in calls:
            assert_rounded(output, outputs[rank].detach(), 100)
            output.backward(problem.grads[rank])
            wanted = [exact[rank].grad, exact[world].grad[mine], exact[world + 1].grad[mine]]
            for leaf, gradient in zip(leaves, [*wanted, exact[world + 2 + rank].grad], strict=True):
                assert_rounded(leaf.grad, torch.zeros_like(leaf).double() if gradient is None else gradient, 400)


@pytest.mark.parametrize(("world", "comm"), [(2, "host"), (2, "baseline"), (3, "host"), (4, "host")])
def test_a_whole_layer_on_two_channels(world, comm):
    run_ranks(world, whole_layer, comm)


def what_ran(folder):
    rank, world = rank_and_world()
    policy_cache.cache_dir = lambda: folder
    problem = MoeProblem.random(0, [5] * world, world, 1, (4, 3), torch.float32)
    input, weight, gates = leaves_of(problem, rank)
    routing = problem.received(rank), problem.tokens[rank], problem.counts(rank)
    fused_ops.reset_counters()
    gemm_all_to_all(input, weight, *routing, gates, 5, require_fused=True).sum().backward()
    gemm_all_to_all(input, weight, *routing, gates, 5, comm="baseline")
    assert fused_ops.counters() == {
        ("gemm_all_to_all", "host", "fused"): 1,
        ("all_to_all_gemm_counts", "host", "fused"): 1,
        ("all_to_all_gemm", "host", "fused"): 1,
        ("gemm_all_to_all", "baseline", "asked for"): 1,
    }
    for _ in range(2):
        check(problem, "auto")


def test_counted_and_chosen(tmp_path):
    run_ranks(2, what_ran, tmp_path)
