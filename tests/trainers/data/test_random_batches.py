import numpy as np
import pytest
import torch

from tests.trainers.data.test_criteo import equal, joined
from trainers.data.errors import DataError
from trainers.data.random_batches import RandomBatches

OPTIONS = {"multi_hot_sizes": [1, 3, 0, 5], "num_dense": 6, "seed": 2}
ROWS = [10, 1000, 7, 2**31 + 5]


@pytest.mark.parametrize("world", [2, 3, 4, 20])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_global_batches_do_not_depend_on_world(world, exponent):
    parts = [RandomBatches(ROWS, 13, rank=r, world=world, zipf_exponent=exponent, **OPTIONS) for r in range(world)]
    whole = RandomBatches(ROWS, 13, zipf_exponent=exponent, **OPTIONS)
    for step in (0, 7):
        assert joined([p.read(step) for p in parts]) == joined([whole.read(step)])


def test_what_is_drawn():
    batch = RandomBatches(ROWS, 4000, **OPTIONS).read(0)
    assert batch.dense.shape == (4000, 6)
    assert abs(batch.dense.mean()) < 0.05
    assert abs(batch.dense.std() - 1) < 0.05
    assert abs(batch.labels.mean() - 0.5) < 0.05
    for key, rows, hot in zip(batch.sparse.keys(), ROWS, OPTIONS["multi_hot_sizes"], strict=True):
        ids = batch.sparse[key].values()
        assert len(ids) == 4000 * hot
        if hot:
            assert 0 <= ids.min() <= ids.max() < rows
            assert abs(ids.double().mean() / rows - 0.5) < 0.05


def test_zipf_prefers_low_ids():
    batch = RandomBatches([1000], 20_000, zipf_exponent=1.2).read(0)
    counts = np.bincount(batch.sparse.values().numpy(), minlength=1000)
    assert counts[0] > counts[1] > counts[5] > counts[100:].mean() > 0


def test_steps_seeds_and_splits_differ_and_resume_is_exact():
    def first(**options):
        return RandomBatches([10**6], 50, **options).read(0).sparse.values().tolist()

    assert len({tuple(first(seed=s, split=split)) for s in (0, 1) for split in ("train", "val")}) == 4
    steps = list(RandomBatches([10**6], 4, num_samples=18))
    assert [len(b) for b in steps] == [4, 4, 4, 4, 2]
    assert not torch.equal(steps[0].sparse.values(), steps[1].sparse.values())
    rest = list(RandomBatches([10**6], 4, num_samples=18, start_step=3))
    assert len(rest) == 2
    assert equal(rest[1], steps[4])


@pytest.mark.parametrize("options", [{"multi_hot_sizes": [1]}, {"zipf_exponent": 1.0}, {"zipf_exponent": -1.0}])
def test_bad_options(options):
    with pytest.raises(DataError):
        RandomBatches([5, 6], 4, **options)
