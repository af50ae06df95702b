"""`all_to_all_gemm` on the host and baseline backends: what it delivers, products and gradients against float64."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import policy_cache
from fused_ops.all_to_all_gemm import all_to_all_gemm
from fused_ops.symmetric.group import context
from tests.fused_ops.moe_reference import MoeProblem, assert_rounded, rank_and_world
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def leaves_of(problem, rank, transposed=False):
    weight = problem.up[problem.mine(rank)]
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight.clone()
    return problem.inputs[rank].clone().requires_grad_(), weight.requires_grad_()


def check(problem, comm, transposed=False, **options):
    """Outputs and gradients against float64, inputs unchanged."""
    rank, world = rank_and_world(options.get("group"))
    input, weight = leaves_of(problem, rank, transposed)
    tokens, counts = problem.tokens[rank].clone(), problem.counts(rank)
    output, dispatched, received = all_to_all_gemm(input, weight, tokens, counts, comm=comm, **options)
    dtype, up = input.dtype, problem.up.double()
    hidden, inner = up.shape[2], up.shape[1]
    every_row = [problem.rows(source) for source in range(world)]
    assert torch.equal(received, problem.received(rank))
    assert dispatched.dtype == output.dtype == dtype
    assert torch.equal(dispatched.double(), problem.dispatched(rank, every_row))
    products = [torch.einsum("rh,rfh->rf", every_row[r], up[problem.experts_of[r]]) for r in range(world)]
    exact = problem.dispatched(rank, products)
    assert_rounded(output, exact, hidden)
    assert torch.equal(input, problem.inputs[rank])
    assert torch.equal(weight, problem.up[problem.mine(rank)])
    assert torch.equal(tokens, problem.tokens[rank])

    # The gradient of a row's product, the same whichever rank asks: of the source's values, so that each knows all of them.
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(len(t), inner, generator=generator).to(dtype) for t in problem.tokens]
    grad = problem.dispatched(rank, grads)
    output.backward(grad)
    home = torch.einsum("rf,rfh->rh", grads[rank].double(), up[problem.experts_of[rank]])
    exact_input = problem.combine(rank, home, torch.ones(len(home)))
    assert input.grad.dtype == weight.grad.dtype == dtype
    assert input.grad.shape == input.shape
    magnitudes = problem.combine(rank, home.abs(), torch.ones(len(home)))
    assert_rounded(input.grad, exact_input, inner * problem.most_rows_of_a_token(rank), magnitudes)
    start, expert_rows = 0, problem.received(rank).sum(1).tolist()
    for expert, rows in enumerate(expert_rows):
        part = slice(start, start + rows)
        exact_weight = grad[part].double().t() @ dispatched[part].double()
        assert_rounded(weight.grad[expert], exact_weight, rows)
        assert rows or not weight.grad[expert].any()
        start += rows


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
            problem = MoeProblem.random(number, tokens, experts, top_k, sizes, dtype, dropped=0.3 * (number % 2))
            check(problem, comm, transposed=number % 4 == 1)


@pytest.mark.parametrize(("world", "comm"), [(1, "host"), (2, "host"), (3, "host"), (4, "host"), (3, "baseline")])
def test_shapes(world, comm):
    run_ranks(world, every_shape, comm)


def special_routings(comm):
    _, world = rank_and_world()
    experts = 4 * world
    for dtype in DTYPES:
        one = MoeProblem.random(1, [50] * world, experts, 1, (9, 6), dtype, allowed=[experts - 1])
        check(one, comm)
        one_rank = MoeProblem.random(2, [50] * world, experts, 2, (9, 6), dtype, allowed=[0, 1, 3])
        check(one_rank, comm)
        check(MoeProblem.random(3, [0] * world, experts, 2, (9, 6), dtype), comm)
        check(MoeProblem.random(4, [20] * world, experts, 2, (9, 6), dtype, dropped=1.0), comm)
        check(MoeProblem.random(5, [0] * (world - 1) + [30], experts, 2, (9, 6), dtype), comm)
        check(MoeProblem.random(6, [11] * world, experts, 2, (5, 0), dtype), comm)
        check(MoeProblem.random(7, [11] * world, experts, 2, (0, 5), dtype), comm)
    check(MoeProblem.random(8, [60, 3, 40][:world], 128 // world * world, 16, (17, 3), torch.float32), comm)


@pytest.mark.parametrize(("world", "comm"), [(2, "host"), (2, "baseline"), (3, "host")])
def test_routings(world, comm):
    run_ranks(world, special_routings, comm)


def many_rows(comm):
    """Experts with so many rows that each source's are multiplied as they come, beside experts with few."""
    _, world = rank_and_world()
    for dtype in DTYPES:
        check(MoeProblem.random(1, [1500, 900, 700][:world], 2 * world, 1, (24, 19), dtype, allowed=[1]), comm)
        check(MoeProblem.random(2, [2500, 2000, 10][:world], 2 * world, 1, (24, 19), dtype, allowed=[0, 3]), comm)


@pytest.mark.parametrize("world", [2, 3])
def test_many_rows(world):
    run_ranks(world, many_rows, "host")


def once(problem, rank):
    """Output and gradients."""
    input, weight = leaves_of(problem, rank)
    output, _, _ = all_to_all_gemm(input, weight, problem.tokens[rank], problem.counts(rank), comm="host")
    output.sin().sum().backward()
    return output.detach(), input.grad, weight.grad


def bits():
    """One problem gives the same bits in every call, whoever is late."""
    rank, world = rank_and_world()
    for tokens in (30, 1100):
        for dtype in DTYPES:
            allowed = None if tokens == 30 else [0, 1, 3]
            problem = MoeProblem.random(3, [tokens] * world, 2 * world, 2, (61, 40), dtype, allowed)
            first = once(problem, rank)
            lanes = context(dist.group.WORLD.group_name).channels()
            for lane in lanes:
                lane.set_stress_delay(3000, 7 * rank + 1)
            for _ in range(4):
                assert all(torch.equal(a, b) for a, b in zip(first, once(problem, rank), strict=True))
            for lane in lanes:
                lane.set_stress_delay(0, 1)


def test_bitwise_repeatable():
    run_ranks(3, bits)


def uneven_columns():
    """Experts of different ranks may have different numbers of columns."""
    rank, world = rank_and_world()
    problem = MoeProblem.random(1, [13, 8, 9], 2 * world, 2, (6, 7), torch.float32)
    input, weight = problem.inputs[rank].requires_grad_(), problem.up[problem.mine(rank), : 3 + rank].requires_grad_()
    output, _, received = all_to_all_gemm(input, weight, problem.tokens[rank], problem.counts(rank), comm="host")
    assert output.shape == (int(received.sum()), 3 + rank)
    output.sum().backward()
    sums = torch.stack([problem.up[e, : 3 + e // 2].double().sum(0) for e in range(problem.experts)])
    home = sums[problem.experts_of[rank]]
    assert_rounded(input.grad, problem.combine(rank, home, torch.ones(len(home))), 20)


def test_uneven_columns():
    run_ranks(3, uneven_columns)


def through_dispatched():
    """A gradient of the dispatched rows goes home beside that of the output."""
    rank, world = rank_and_world()
    problem = MoeProblem.random(1, [13, 8], 2 * world, 2, (6, 4), torch.float32)
    grads = {}
    for uses in ("both", "dispatched"):
        input, weight = leaves_of(problem, rank)
        output, dispatched, received = all_to_all_gemm(input, weight, problem.tokens[rank], problem.counts(rank))
        scale = torch.arange(1.0, world + 1).repeat(len(received)).repeat_interleave(received.flatten()).unsqueeze(1)
        (output.sum() * (uses == "both") + (dispatched * scale).sum()).backward()
        grads[uses] = input.grad
    rows = problem.tokens[rank].bincount(minlength=len(problem.inputs[rank])).unsqueeze(1)
    assert torch.equal(grads["dispatched"], (rank + 1.0) * rows.expand(-1, 6).float())
    home = problem.up.double().sum(1)[problem.experts_of[rank]]
    exact = problem.combine(rank, home, torch.ones(len(home))) + grads["dispatched"].double()
    assert_rounded(grads["both"], exact, 50)


def test_gradient_of_the_dispatched_rows():
    run_ranks(2, through_dispatched)


def kept_results():
    """What was returned stays as it is, however many calls follow; rows of any stride are taken."""
    rank, world = rank_and_world()
    kept = []
    for call in range(80):  # more than a channel has slots
        problem = MoeProblem.random(call, [40] * world, world, 1, (6, 3), torch.float32)
        wide = torch.stack([problem.inputs[rank]] * 2, call % 2 + 1)
        input = wide[:, 1] if call % 2 == 0 else wide[:, :, 1]
        weight = problem.up[problem.mine(rank)]
        _, dispatched, _ = all_to_all_gemm(input, weight, problem.tokens[rank], problem.counts(rank), comm="host")
        kept.append((dispatched, problem.dispatched(rank, [problem.rows(s, torch.float32) for s in range(world)])))
    assert all(torch.equal(dispatched, exact) for dispatched, exact in kept)
    kept[0][0].mul_(2)
    assert torch.equal(kept[0][0], 2 * kept[0][1])


def test_results_are_the_callers():
    run_ranks(2, kept_results)


def what_ran(folder):
    rank, world = rank_and_world()
    policy_cache.cache_dir = lambda: folder
    problem = MoeProblem.random(0, [5] * world, world, 1, (4, 3), torch.float32)
    routing = problem.tokens[rank], problem.counts(rank)
    fused_ops.reset_counters()
    all_to_all_gemm(*leaves_of(problem, rank), *routing, require_fused=True)[0].sum().backward()
    all_to_all_gemm(*leaves_of(problem, rank), *routing, comm="baseline")[0].sum().backward()
    assert fused_ops.counters() == {
        ("all_to_all_gemm_counts", "host", "fused"): 1,
        ("all_to_all_gemm", "host", "fused"): 1,
        ("gemm_all_to_all", "host", "fused"): 1,
        ("all_to_all_gemm_counts", "baseline", "asked for"): 1,
        ("all_to_all_gemm", "baseline", "asked for"): 1,
        ("gemm_all_to_all", "baseline", "asked for"): 1,
    }
    for _ in range(2):
        check(problem, "auto")


def test_counted_and_chosen(tmp_path):
    run_ranks(2, what_ran, tmp_path)
