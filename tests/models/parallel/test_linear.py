"""Column- and row-parallel linears equal the unsplit one in float64, outputs and all gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.parallel.linear import ColumnParallelLinear, RowParallelLinear
from models.parallel.shards import even_split, load_full, parameter_shards
from models.parallel.tensor_parallel import TensorParallel
from tests.models.close import assert_close, assert_same_on_all_ranks
from tests.ranks import run_ranks

ROWS = (6, 7, 1, 0)
UNITS = ((4, 3), (5, 2), (3, 1))  # units, columns a unit; not all divide by the ranks
HIDDEN = 9


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def mine(tensor: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """This rank's rows where they are split."""
    if not tp.sequence_parallel:
        return tensor
    start, stop = even_split(len(tensor), tp.world, tp.rank)
    return tensor[start:stop]


def column(tp: TensorParallel, rows: int, units: int, size: int, stacked: int, bias: bool) -> None:
    layer = ColumnParallelLinear(HIDDEN, units, size, bias=bias, tp=tp, stacked=stacked)
    lead = (stacked,) if stacked > 1 else ()
    weight, offset = whole(random(*lead, units * size, HIDDEN)), whole(random(*lead, units * size))
    load_full(layer, {"weight": weight, "bias": offset} if bias else {"weight": weight})
    input = whole(random(rows, HIDDEN))
    want = F.linear(input, weight.flatten(0, -2), offset.flatten() if bias else None).view(rows, *weight.shape[:-1])
    local = whole(mine(input.detach(), tp).float())
    got = layer(local, rows if tp.sequence_parallel else None)

    shard = layer.shards["weight"]
    columns = slice(shard.start, shard.stop)
    assert_close(got, want[..., columns], "output")
    factor = random(*want.shape, seed=1)
    (want * factor).sum().backward()
    (got * factor[..., columns].float()).sum().backward()
    assert_close(local.grad, mine(input.grad, tp), "gradient of the input")
    assert_close(layer.weight.grad, shard.of(weight.grad), "gradient of the weight")
    if bias:
        assert_close(layer.bias.grad, shard.of(offset.grad), "gradient of the bias")


def row(tp: TensorParallel, rows: int, units: int, size: int, bias: bool) -> None:
    layer = RowParallelLinear(units, size, HIDDEN, bias=bias, tp=tp)
    weight, offset = whole(random(HIDDEN, units * size)), whole(random(HIDDEN))
    load_full(layer, {"weight": weight, "bias": offset} if bias else {"weight": weight})
    input = whole(random(rows, units * size))
    want = F.linear(input, weight, offset if bias else None)
    shard = layer.shards["weight"]
    local = whole(input.detach()[:, shard.start : shard.stop].float())
    got = layer(local, rows if tp.sequence_parallel else None)

    assert_close(got, mine(want, tp), "output")
    factor = random(*want.shape, seed=1)
    (want * factor).sum().backward()
    (got * mine(factor, tp).float()).sum().backward()
    assert_close(local.grad, input.grad[:, shard.start : shard.stop], "gradient of the input")
    assert_close(layer.weight.grad, shard.of(weight.grad), "gradient of the weight")
    if bias:
        assert_close(layer.bias.grad, offset.grad, "gradient of the bias")
        assert_same_on_all_ranks(layer.bias.grad, "gradient of the bias")


def every_shape(comm: str, sequence_parallel: bool) -> None:
    for save_gathered in (True, False) if sequence_parallel else (True,):
        tp = TensorParallel(
            dist.group.WORLD, comm=comm, sequence_parallel=sequence_parallel, save_gathered=save_gathered
        )
        for rows in ROWS:
            for units, size in UNITS:
                for bias in (False, True):
                    column(tp, rows, units, size, 1, bias)
                    column(tp, rows, units, size, 2, bias)
                    row(tp, rows, units, size, bias)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("comm", ["fused", "baseline"])
@pytest.mark.parametrize("world", [2, 3])
def test_equal_to_the_unsplit_linear(world, comm, sequence_parallel):
    run_ranks(world, every_shape, comm, sequence_parallel)


def test_one_rank_without_a_process_group():
    column(TensorParallel(), 5, 3, 2, 2, bias=True)
    row(TensorParallel(), 5, 3, 2, bias=True)


def frozen_and_autocast():
    tp = TensorParallel(dist.group.WORLD)
    first, second = ColumnParallelLinear(4, 6, 1, bias=True, tp=tp), RowParallelLinear(6, 1, 4, bias=True, tp=tp)
    for layer in (first, second):
        load_full(layer, {n: torch.ones(s) for n, s in (("weight", full(layer)), ("bias", bias(layer)))})
    with torch.autocast("cpu", torch.bfloat16):
        output = second(F.gelu(first(torch.ones(3, 4))))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for layer in (first, second) for p in layer.parameters())
    first.weight.requires_grad_(False)
    first.bias.grad = None
    input = torch.ones(3, 4, requires_grad=True)
    second(first(input)).sum().backward()
    assert_close(input.grad, torch.full((3, 4), 24.0))
    assert_close(first.bias.grad, torch.full_like(first.bias, 12.0))


def full(layer: torch.nn.Module) -> torch.Size:
    return parameter_shards(layer)["weight"].full_shape(layer.weight.shape)


def bias(layer: torch.nn.Module) -> torch.Size:
    shards = parameter_shards(layer)
    return shards["bias"].full_shape(layer.bias.shape) if "bias" in shards else layer.bias.shape


def test_autocast_and_frozen_weights():
    run_ranks(2, frozen_and_autocast)
