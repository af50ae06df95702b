import numpy as np
import pytest
import torch

from tests.trainers.data.clicks import random_lines, save, write
from tests.trainers.data.test_arrays import HOT
from trainers.data import order
from trainers.data.batch import Batch
from trainers.data.criteo import CriteoBatches
from trainers.data.errors import DataError
from trainers.data.options import PrepareOptions
from trainers.data.prepare import prepare


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", 8)
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 4)


@pytest.fixture
def directory(tmp_path):
    return save(tmp_path / "data", [50, 33, 21])


def equal(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.dense, b.dense)
        and torch.equal(a.labels, b.labels)
        and a.sparse.keys() == b.sparse.keys()
        and torch.equal(a.sparse.values(), b.sparse.values())
        and torch.equal(a.sparse.lengths(), b.sparse.lengths())
    )


def joined(parts: list[Batch]) -> tuple:
    keys = parts[0].sparse.keys()
    return (
        torch.cat([p.dense for p in parts]).tolist(),
        torch.cat([p.labels for p in parts]).tolist(),
        [torch.cat([p.sparse[key].values() for p in parts]).tolist() for key in keys],
        [torch.cat([p.sparse[key].lengths() for p in parts]).tolist() for key in keys],
    )


def test_batch_is_what_the_files_hold(directory):
    batch = next(iter(CriteoBatches(directory, "train", 60)))
    dense, sparse, labels = (
        np.concatenate([np.load(directory / f"day_{d}_{kind}.npy") for d in (0, 1)])[:60]
        for kind in ("dense", "sparse", "labels")
    )
    assert torch.equal(batch.dense, torch.from_numpy(dense))
    assert torch.equal(batch.labels, torch.from_numpy(labels[:, 0]).float())
    assert batch.sparse.keys() == [f"cat_{i}" for i in range(26)]
    assert batch.sparse.stride() == len(batch) == 60
    for feature, key in enumerate(batch.sparse.keys()):
        assert batch.sparse[key].values().tolist() == sparse[:, feature].tolist()
        assert batch.sparse[key].lengths().tolist() == [1] * 60
    types = (batch.dense.dtype, batch.labels.dtype, batch.sparse.values().dtype, batch.sparse.lengths().dtype)
    assert types == (torch.float32, torch.float32, torch.int64, torch.int32)


@pytest.mark.parametrize("world", [2, 3, 4, 9])
def test_global_batches_do_not_depend_on_world(directory, world):
    def parts(rank: int, size: int) -> list[Batch]:
        return list(CriteoBatches(directory, "train", 8, rank=rank, world=size, seed=5, shuffle=True, epochs=2))

    whole = parts(0, 1)
    ranks = [parts(rank, world) for rank in range(world)]
    assert {len(r) for r in ranks} == {len(whole)} == {2 * 11}
    for step, batch in enumerate(whole):
        local = [r[step] for r in ranks]
        sizes = [len(b) for b in local]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert joined(local) == joined([batch])
    assert [len(b) for b in whole[:11]] == [8] * 10 + [3]  # 83 training samples; the partial batch is kept
    if world == 9:
        assert len(ranks[8][0]) == 0


def test_empty_local_batch_is_a_batch(directory):
    batch = next(iter(CriteoBatches(directory, "train", 2, rank=2, world=3)))
    assert batch.dense.shape == (0, 13)
    assert batch.labels.shape == (0,)
    assert batch.sparse.stride() == 0
    assert batch.sparse.values().dtype == torch.int64
    assert batch.sparse["cat_25"].values().shape == (0,)  # (TorchRec's to_dict fails at stride 0)


@pytest.mark.parametrize("start", [1, 10, 11, 25])
def test_resume_is_exact(directory, start):
    def batches(start_step: int) -> CriteoBatches:
        return CriteoBatches(directory, "train", 8, shuffle=True, seed=1, epochs=3, start_step=start_step)

    whole, rest = list(batches(0)), list(batches(start))
    assert len(rest) == len(batches(start)) == 33 - start
    assert all(equal(a, b) for a, b in zip(whole[start:], rest, strict=True))


def test_far_step_costs_no_replay(directory):
    batches = CriteoBatches(directory, "train", 8, shuffle=True, start_step=10**12)
    assert len(next(iter(batches))) == 8


def test_every_split_is_read_once(directory):
    numbers = {}
    for split, size in (("train", 83), ("val", 10), ("test", 11)):
        found = torch.cat([b.dense[:, 0] for b in CriteoBatches(directory, split, 7, epochs=1, shuffle=True)])
        assert len(found) == size
        numbers[split] = found
    assert torch.cat(list(numbers.values())).sort().values.tolist() == list(range(104))


def test_multi_hot(tmp_path):
    save(tmp_path, [20, 10])
    rng = np.random.default_rng(0)
    days = []
    for day, samples in enumerate((20, 10)):
        days.append({str(i): rng.integers(0, 9, (samples, hot), dtype=np.int32) for i, hot in enumerate(HOT)})
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **days[-1])
    parts = [CriteoBatches(tmp_path, "train", 7, multi_hot=True, rank=r, world=2).read(1) for r in range(2)]
    for i, hot in enumerate(HOT):
        values = torch.cat([p.sparse[f"cat_{i}"].values() for p in parts])
        assert values.tolist() == days[0][str(i)][7:14].reshape(-1).tolist()
        assert parts[1].sparse[f"cat_{i}"].lengths().tolist() == [hot] * 3


def test_id_beyond_its_table_is_named(directory):
    sparse = np.load(directory / "day_0_sparse.npy")
    sparse[13, 4] = 100
    np.save(directory / "day_0_sparse.npy", sparse)
    rows = [100] * 26
    reason = r"day_0_sparse\.npy: feature cat_4 has id 100, allowed are 0 \.\. 99"
    batches = iter(CriteoBatches(directory, "train", 10, table_rows=rows))
    next(batches)
    with pytest.raises(DataError, match=reason):  # raised in the reading thread, seen here
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert len(list(CriteoBatches(directory, "train", 10, epochs=1))) == 9  # not checked unless asked
    sparse[13, 4] = -1
    np.save(directory / "day_0_sparse.npy", sparse)
    with pytest.raises(DataError, match="cat_4 has id -1"):
        list(CriteoBatches(directory, "train", 10, table_rows=rows, epochs=1))


def test_ids_known_from_meta_are_checked_before_reading(tmp_path):
    prepare([write(tmp_path / "a", random_lines(100))], tmp_path / "out", PrepareOptions())
    largest = CriteoBatches(tmp_path / "out", "train", 10).max_ids()
    CriteoBatches(tmp_path / "out", "train", 10, table_rows=[n + 1 for n in largest])
    rows = [n + 1 for n in largest]
    rows[3] -= 1
    with pytest.raises(DataError, match=rf"max_ids: cat_3 has id {largest[3]} but {rows[3]} rows"):
        CriteoBatches(tmp_path / "out", "train", 10, table_rows=rows)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"split": "valid"}, "split 'valid', allowed are train, val, test"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"rank": 2, "world": 2}, "rank 2, world 2"),
        ({"table_rows": [5] * 8}, "8 tables"),
    ],
)
def test_bad_arguments(directory, options, reason):
    with pytest.raises(DataError, match=reason):
        CriteoBatches(directory, **({"split": "train", "batch_size": 4} | options))


def test_empty_split_is_refused(tmp_path):
    with pytest.raises(DataError, match="split val has no samples"):
        CriteoBatches(save(tmp_path, [5]), "val", 4)
