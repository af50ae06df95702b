"""The GEMM operators in Triton against float64: every kind of shape, strides and gradients."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from fused_ops.symmetric.group import context, group_name
from tests.fused_ops.gemm_reference import Problem, rank_and_world, rows_of, tolerance
from tests.fused_ops.triton_ranks import DEVICES, run_triton_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 5), (1, 1), (3, 0), (2, 19), (33, 130), (150, 70)]  # rows, columns

pytestmark = pytest.mark.parametrize("device", DEVICES)


def limits(device, dtype, terms):
    limits = tolerance("triton", dtype, terms)
    if device.type == "cpu" and dtype == torch.bfloat16:
        limits["rtol"] *= 2  # the interpreter cuts off instead of rounding
    return limits


def on(device, tensors):
    """Leaves on that device, in their layout."""
    return [None if t is None else t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]


def check_gradients(output, grad, leaves, problem, dtype):
    output.backward(grad.to(output.device))
    fused_ops.check_errors()
    rank, _ = rank_and_world()
    for leaf, exact in zip(leaves, problem.exact_gradients(rank), strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            torch.testing.assert_close(leaf.grad.cpu().double(), exact, **tolerance("baseline", dtype, problem.terms))


def check_reduce_scatter(problem, device, transposed=False, backward=False):
    rank, world = rank_and_world()
    dtype = problem.grad.dtype
    leaves = on(device, problem.leaves(rank, transposed))
    output = gemm_reduce_scatter(*leaves, comm="triton")
    fused_ops.check_errors()
    mine = rows_of(problem.grad.shape[0], world, rank)
    assert output.dtype == dtype
    torch.testing.assert_close(output.cpu().double(), problem.exact[mine], **limits(device, dtype, problem.terms))
    if backward:
        check_gradients(output, problem.grad[mine], leaves, problem, dtype)


def check_all_reduce(problem, device, transposed=False, backward=False):
    rank, world = rank_and_world()
    dtype = problem.grad.dtype
    leaves = on(device, problem.leaves(rank, transposed))
    output = gemm_all_reduce(*leaves, comm="triton")
    fused_ops.check_errors()
    assert output.dtype == dtype
    torch.testing.assert_close(output.cpu().double(), problem.exact, **limits(device, dtype, problem.terms))
    same = output.detach().cpu()
    everywhere = [torch.empty_like(same) for _ in range(world)]
    dist.all_gather(everywhere, same)
    assert all(torch.equal(same, other) for other in everywhere)
    if backward:
        check_gradients(output, problem.grad, leaves, problem, dtype)


def check_all_gather(seed, rows, columns, inner, dtype, device, total_known=True):
    """columns[r] of rank r."""
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, inner, generator=generator).to(dtype)
    weights = [torch.randn(size, inner, generator=generator).to(dtype) for size in columns]
    biases = [torch.randn(size, generator=generator).to(dtype) for size in columns]
    bias = biases[rank] if seed % 2 else None
    weight = weights[rank].t().contiguous().t() if seed % 3 == 0 else weights[rank]
    output, gathered = all_gather_gemm(
        *on(device, (whole[rows_of(rows, world, rank)], weight, bias)),
        total_rows=rows if total_known else None,
        return_gathered=True,
        comm="triton",
    )
    fused_ops.check_errors()
    exact = whole.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert output.dtype == dtype
    torch.testing.assert_close(output.cpu().double(), exact, **limits(device, dtype, inner))
    assert torch.equal(gathered.cpu(), whole)
    assert gathered.is_contiguous()


def in_two_phases():
    """However small the output is."""
    from fused_ops.backends.triton import gemm_all_reduce as backend

    backend.plan.cache_clear()
    backend.ONE_PHASE_BYTES = 0


def every_shape(device):
    """Odd sizes and none, inner dimensions that differ and a rank without one; every dtype, with and without bias."""
    _, world = rank_and_world()
    shapes = SHAPES if world == 2 else SHAPES[2::3]
    for two_phases in (False, True):
        if two_phases:
            in_two_phases()
        for number, (rows, columns) in enumerate(shapes):
            inner = [(number * (r + 5) * 7) % 80 for r in range(world)]
            inner[number % world] *= number % 2
            problem = Problem.random(number, (rows,), columns, inner, DTYPES[number % 3], bias=number % 2 == 0)
            if not two_phases or number > 1:
                check_all_reduce(problem, device, transposed=number % 4 == 1)
            if not two_phases:
                check_reduce_scatter(problem, device, transposed=number % 4 == 1)
    sizes = [(0, 4), (1, 5), (2, 0), (9, 19), (150, 72), (301, 600)]  # rows, inner
    for number, (rows, inner) in enumerate(sizes if world == 2 else sizes[2::3]):
        columns = [(number * (r + 5) * 11) % 90 for r in range(world)]
        check_all_gather(number, rows, columns, inner, DTYPES[number % 3], device, total_known=number % 4 != 1)


def with_large_tiles():
    """However few they are."""
    from fused_ops.backends.triton import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
    from fused_ops.backends.triton.gemm_tiles import LARGE, MEDIUM_FLOAT

    for module in (all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter):
        module.tile_shape = lambda *of: MEDIUM_FLOAT if torch.float32 in of else LARGE


def large_tiles(device):
    in_two_phases()
    with_large_tiles()
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem.random(1, (150,), 280, [70, 50], dtype)
        check_reduce_scatter(problem, device)
        check_all_reduce(problem, device)
        check_all_gather(1, 140, [280, 20], 72, dtype, device)


def test_large_tiles(device):
    run_triton_ranks(2, device, large_tiles)


def groups_and_channels(device):
    """A subgroup's calls and the whole group's, on channels of their own, in turn."""
    rank, _ = rank_and_world()
    group = [dist.new_group([0, 2]), dist.new_group([1])][rank % 2]
    factors = torch.full((5, 3), rank + 1.0, device=device), torch.ones(7, 3, device=device)
    for channel in (0, 3):
        some = gemm_all_reduce(*factors, group=group, channel=channel, comm="triton")
        everybodys = gemm_reduce_scatter(*factors, channel=channel, comm="triton")
        assert (some == 3 * (4 if rank % 2 == 0 else 2)).all()
        assert (everybodys == 3 * 6).all()
    for lane in context(group_name(None)).channels():
        lane.link = "pinned"  # as if its slots were in host memory
    for inner in (12, 13):
        check_all_gather(inner, 7, [5, 0, 6], inner, torch.float32, device, total_known=False)
    fused_ops.check_errors()


def test_subgroups_and_channels(device):
    run_triton_ranks(3, device, groups_and_channels)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_shape_matches_float64(device, world):
    run_triton_ranks(world, device, every_shape)


def gradients(device):
    """Of all inputs, and of what `return_gathered` returned, where the gathered rows are kept and where they are not."""
    rank, world = rank_and_world()
    for number, dtype in enumerate(DTYPES):
        problem = Problem.random(number, (13,), 21, [17, 9], dtype)
        check_reduce_scatter(problem, device, transposed=number == 1, backward=True)
        check_all_reduce(problem, device, transposed=number == 2, backward=True)
    generator = torch.Generator().manual_seed(3)
    whole, weights = torch.randn(11, 6, generator=generator), torch.randn(world, 7, 6, generator=generator)
    grads = torch.randn(world, 11, 7, generator=generator)
    exact = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    for save_gathered in (False, True):
        mine = rows_of(11, world, rank)
        input, weight = on(device, (whole[mine].requires_grad_(), weights[rank].clone().requires_grad_()))
        output = all_gather_gemm(input, weight, total_rows=11, save_gathered=save_gathered, comm="triton")
        output.backward(grads[rank].to(device))
        torch.testing.assert_close(input.grad.cpu().double(), exact[mine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight.grad.cpu(), grads[rank].t() @ whole, rtol=1e-5, atol=1e-5)
    fused_ops.check_errors()


def test_gradients(device):
    run_triton_ranks(2, device, gradients)


def strange_strides(device):
    rank, world = rank_and_world()
    base = torch.randn(world, 40, 64, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(world, 90, 64, generator=torch.Generator().manual_seed(2))
    pairs = {
        "every second column": (base[:, :, ::2], weights[:, :45, ::2]),
        "an odd start": (base[:, :, 1:33], weights[:, :45, 3:35]),
        "expanded": (base[:, :1, :32].expand(-1, 40, -1), weights[:, :1, :32].expand(-1, 45, -1)),
        "transposed": (base[:, :32, :40].transpose(1, 2), weights[:, :32, :45].transpose(1, 2)),
        "one inner": (base[:, :, 5:6], weights[:, :45, 7:8]),
    }
    bias = torch.randn(90, generator=torch.Generator().manual_seed(3)).to(device)[::2]
    base, weights = base.to(device), weights.to(device)
    for name, (inputs, all_weights) in pairs.items():
        exact = sum(i.double() @ w.double().t() for i, w in zip(inputs, all_weights, strict=True)) + bias.cpu().double()
        output = gemm_all_reduce(inputs[rank].to(device), all_weights[rank].to(device), bias, comm="triton")
        torch.testing.assert_close(output.cpu().double(), exact, msg=name, **tolerance("triton", torch.float32))
        rows = inputs[0][rows_of(40, world, rank)].to(device)
        output = all_gather_gemm(rows, all_weights[rank].to(device), total_rows=40, comm="triton")
        exact = inputs[0].double() @ all_weights[rank].double().t()
        torch.testing.assert_close(output.cpu().double(), exact, msg=name, **tolerance("triton", torch.float32))
    fused_ops.check_errors()


def test_any_strides(device):
    run_triton_ranks(2, device, strange_strides)
