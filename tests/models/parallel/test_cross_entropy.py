"""Vocabulary-parallel cross-entropy equals torch's on the whole logits, its gradient too."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.parallel.collectives import gather_columns
from models.parallel.cross_entropy import vocabulary_parallel_cross_entropy
from models.parallel.tensor_parallel import TensorParallel
from tests.models.close import assert_close, assert_same_on_all_ranks
from tests.ranks import run_ranks

ROWS = 9


def spans_of(world: int) -> list[list[int]]:
    """Columns of every rank: even, uneven, and some with none."""
    return [
        [4] * world,
        [5, *[3] * (world - 1)],
        [0, *[3] * (world - 1)],
        [*[2] * (world - 1), 0],
        [1, *[0] * (world - 1)],
    ]


def compare(sizes: list[int], targets: torch.Tensor, dtype: torch.dtype, scale: float, tolerance: float) -> None:
    tp = TensorParallel(dist.group.WORLD) if dist.is_initialized() else TensorParallel()
    vocabulary, first = sum(sizes), sum(sizes[: tp.rank])
    columns = slice(first, first + sizes[tp.rank])
    generator = torch.Generator().manual_seed(vocabulary)
    values = (torch.randn(len(targets), vocabulary, generator=generator) * scale).to(dtype)
    whole = values.double().clone().requires_grad_()
    local = values[:, columns].clone().requires_grad_()
    before = local.detach().clone()
    want = F.cross_entropy(whole, targets, reduction="none")
    got = vocabulary_parallel_cross_entropy(local, targets, first, vocabulary, tp)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(got, want, f"loss of {sizes}", tolerance)
    assert bool((got[targets == -100] == 0).all())
    factor = torch.randn(len(targets), generator=generator)
    (want * factor).sum().backward()
    (got * factor).sum().backward()
    assert local.grad.dtype == dtype
    # Absolute, as softmax is: a rank's own columns may have next to none of it.
    assert float((local.grad.double() - whole.grad[:, columns]).abs().sum()) <= 3 * tolerance * ROWS
    assert torch.equal(local.detach(), before)
    assert_same_on_all_ranks(got.detach())


def every_case():
    world = dist.get_world_size()
    for sizes in spans_of(world):
        generator = torch.Generator().manual_seed(1)
        targets = torch.randint(0, sum(sizes), (ROWS,), generator=generator)
        ignored = targets.clone()
        ignored[::3] = -100
        for chosen in (targets, ignored, torch.full_like(targets, -100), targets[:0]):
            compare(sizes, chosen, torch.float64, 1, 1e-12)
            compare(sizes, chosen, torch.float32, 1, 1e-6)
            compare(sizes, chosen, torch.float32, 1000, 1e-6)
            compare(sizes, chosen, torch.bfloat16, 1, 1e-2)


@pytest.mark.parametrize("world", [2, 3])
def test_equal_to_torch(world):
    run_ranks(world, every_case)


def test_one_rank_without_a_process_group():
    compare([7], torch.tensor([0, 6, -100, 3]), torch.float32, 1, 1e-6)


@pytest.mark.parametrize("target", [-1, 7, -101])
def test_a_target_outside_the_vocabulary_is_refused(target):
    with pytest.raises(ValueError, match=rf"target {target} is outside \[0, 7\), and not -100"):
        vocabulary_parallel_cross_entropy(torch.zeros(2, 7), torch.tensor([1, target]), 0, 7, TensorParallel())


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"targets must be \[2\]"):
        vocabulary_parallel_cross_entropy(torch.zeros(2, 7), torch.tensor([1]), 0, 7, TensorParallel())


def gathered():
    tp = TensorParallel(dist.group.WORLD)
    for sizes in spans_of(tp.world):
        first = sum(sizes[: tp.rank])
        whole = torch.arange(2 * 3 * sum(sizes), dtype=torch.float32).view(2, 3, -1)
        local = whole[..., first : first + sizes[tp.rank]].clone().requires_grad_()
        got = gather_columns(local, sizes, tp)
        assert torch.equal(got, whole)
        (got * whole).sum().backward()
        assert torch.equal(local.grad, local.detach())


def test_gathered_columns_and_their_gradient():
    run_ranks(3, gathered)
