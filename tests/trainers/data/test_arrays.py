import numpy as np
import pytest

from tests.trainers.data.clicks import save
from trainers.data.arrays import Dataset, map_npz
from trainers.data.errors import DataError

HOT = [1, 3, 2] + [1] * 22 + [7]


def multi_hot(samples: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {str(i): rng.integers(0, 100, (samples, hot), dtype=np.int32) for i, hot in enumerate(HOT)}


def test_npz_is_mapped_not_loaded(tmp_path):
    arrays = multi_hot()
    np.savez(tmp_path / "a.npz", **arrays)
    mapped = map_npz(tmp_path / "a.npz")
    for i, found in enumerate(mapped):
        assert isinstance(found.base, np.memmap)
        np.testing.assert_array_equal(found, arrays[str(i)])


def test_compressed_npz_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **multi_hot())
    with pytest.raises(DataError, match=r"a\.npz: array 0\.npy is compressed .* numpy\.savez instead"):
        map_npz(tmp_path / "a.npz")


def test_npz_of_something_else_is_refused(tmp_path):
    arrays = multi_hot()
    path = tmp_path / "a.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if name != "7"})
    with pytest.raises(DataError, match=r"expected 0 \.\. 25"):
        map_npz(path)
    np.savez(path, **(arrays | {"3": np.zeros((9, 1), np.float32)}))
    with pytest.raises(DataError, match=r"array 3\.npy is float32 \[9, 1\], expected integers"):
        map_npz(path)
    path.write_text("no zip")
    with pytest.raises(DataError, match=r"not a \.npz file"):
        map_npz(path)


def test_foreign_directory_is_split_by_days(tmp_path):
    data = Dataset(save(tmp_path / "a", [10, 20, 7]))
    assert data.meta is None
    assert data.split_samples() == {"train": 30, "val": 3, "test": 4}


def broken(kind: str, array: np.ndarray):
    return lambda path: np.save(path / f"day_1_{kind}.npy", array)


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        (broken("sparse", np.zeros((19, 26), np.int32)), r"day 1 has 20 labels, 20 dense rows and \[19\] sparse rows"),
        (broken("dense", np.zeros((20, 12), np.float32)), r"day_1_dense\.npy: float32 \[20, 12\], expected a floating"),
        (broken("sparse", np.zeros((20, 26), np.float32)), r"float32 \[20, 26\], expected a integer array"),
        (lambda path: (path / "day_1_dense.npy").unlink(), r"day_1_dense\.npy: no such file"),
        (lambda path: (path / "day_1_dense.npy").write_text("x"), r"day_1_dense\.npy: not a \.npy array"),
        (lambda path: (path / "day_0_labels.npy").unlink(), r"days \[0\] are missing"),
    ],
)
def test_broken_directory_is_named(tmp_path, breaking, reason):
    save(tmp_path, [10, 20])
    breaking(tmp_path)
    with pytest.raises(DataError, match=reason):
        Dataset(tmp_path)


def test_unfinished_or_absent_directory(tmp_path):
    with pytest.raises(DataError, match=r"no such directory; .*prepare_criteo"):
        Dataset(tmp_path / "none")
    (tmp_path / ".prepare").mkdir()
    with pytest.raises(DataError, match="not finished; run that command again"):
        Dataset(tmp_path)
