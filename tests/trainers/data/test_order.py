import numpy as np
import pytest

from trainers.data import order
from trainers.data.order import SampleOrder, rank_range


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", 8)
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 4)


@pytest.mark.parametrize("samples", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_ranks_share_as_evenly_as_it_goes(samples, world):
    ranges = [rank_range(samples, rank, world) for rank in range(world)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == samples
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("samples", [1, 7, 8, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_is_every_sample_once(samples, batch_size, shuffle):
    found = SampleOrder(samples, batch_size, 3, shuffle)
    for epoch in range(2):
        steps = range(epoch * found.steps_per_epoch, (epoch + 1) * found.steps_per_epoch)
        batches = [found.rows(*found.batch(step)) for step in steps]
        assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert sorted(np.concatenate(batches)) == list(range(samples))


def test_epochs_and_seeds_differ_and_repeat():
    def epoch(seed: int, number: int) -> list[int]:
        return SampleOrder(500, 10, seed, True).rows(number, 0, 500).tolist()

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}) == 9


def test_shuffle_mixes_within_few_blocks():
    rows = SampleOrder(3200, 16, 0, True).rows(0, 0, 32)
    assert len(np.unique(rows // 8)) == 4  # one window's blocks, wholly used before the next
    assert (np.diff(rows) != 1).mean() > 0.7
    assert rows.min() > 0 or rows.max() > 100
