"""Which rank holds what, and first weights that do not depend on it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from models.parallel.initial_values import CHUNK_ELEMENTS, fill_normal
from models.parallel.shards import Shard, even_split, full_shapes, load_full, parameter_shards


class Split(nn.Module):
    """A weight [10, 3] of which this rank holds rows 4 to 6, and a replicated bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.shards = {"weight": Shard(0, 10, 4, 7)}


@pytest.mark.parametrize(("size", "world"), [(10, 3), (9, 3), (2, 4), (0, 2), (5, 1)])
def test_an_even_split_covers_all_and_differs_by_one_at_most(size, world):
    spans = [even_split(size, world, rank) for rank in range(world)]
    assert spans[0][0] == 0
    assert spans[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
    sizes = [stop - start for start, stop in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_names_shapes_and_loading():
    model = nn.Sequential(Split(), nn.Linear(3, 2))
    assert parameter_shards(model) == {"0.weight": Shard(0, 10, 4, 7)}
    assert {name: tuple(shape) for name, shape in full_shapes(model).items()} == {
        "0.weight": (10, 3),
        "0.bias": (3,),
        "1.weight": (2, 3),
        "1.bias": (2,),
    }
    full = {name: torch.rand(shape) for name, shape in full_shapes(model).items()}
    load_full(model, full)
    assert torch.equal(model[0].weight, full["0.weight"][4:7])
    assert torch.equal(model[1].weight, full["1.weight"])


def test_what_does_not_fit_is_refused():
    model = Split()
    with pytest.raises(ValueError, match=r"missing \['bias'\], unknown \['offset'\]"):
        load_full(model, {"weight": torch.zeros(10, 3), "offset": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"weight has shape \(3, 3\), the model needs \(10, 3\)"):
        load_full(model, {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)})


@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5), (7, 1), (9, CHUNK_ELEMENTS // 4 + 1)])
def test_first_weights_are_the_same_for_every_split(shape):
    whole = nn.Parameter(torch.empty(shape))
    fill_normal(whole, None, "some.weight", 0.5, seed=3)
    for dim in range(len(shape)):
        for world in (1, 2, 3):
            for rank in range(world):
                shard = Shard(dim, shape[dim], *even_split(shape[dim], world, rank))
                part = nn.Parameter(torch.empty(shard.of(whole).shape))
                fill_normal(part, shard, "some.weight", 0.5, seed=3)
                assert torch.equal(part, shard.of(whole)), (dim, world, rank)


def test_first_weights_depend_on_seed_and_name_and_have_their_spread():
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("a", 1), ("a", 1 << 40)):
        drawn[name, seed] = nn.Parameter(torch.empty(300, 300))
        fill_normal(drawn[name, seed], None, name, 0.02, seed)
        assert float(drawn[name, seed].detach().std()) == pytest.approx(0.02, rel=0.02)
        assert abs(float(drawn[name, seed].detach().mean())) < 3e-4
    values = list(drawn.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
