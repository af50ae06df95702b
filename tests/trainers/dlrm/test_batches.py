import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.trainers.data.clicks import save
from trainers.data import synthetic
from trainers.data.errors import DataError
from trainers.dlrm.batches import build_batches, data_info
from trainers.dlrm.config import ClicksConfig, DLRMConfig

MODEL = DLRMConfig(
    name="m", embedding_dim=4, table_rows=[30] * 25 + [300], bottom_mlp=[8, 4], top_mlp=[8, 1], out_of_range="error"
)
SYNTHETIC = ClicksConfig(kind="synthetic", batch_size=64, num_samples=3000, seed=1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_synthetic_data_is_made_once_and_fits_the_model(cache, monkeypatch, capfd):
    batches = build_batches(SYNTHETIC, MODEL, "train")
    assert all(m < rows for m, rows in zip(batches.max_ids(), MODEL.table_rows, strict=True))
    assert [len(b) for b in (next(iter(batches)), batches.read(batches.steps_per_epoch - 1))] == [64, 2572 % 64]
    assert "generating 3000 synthetic samples" in capfd.readouterr().err
    monkeypatch.setattr(synthetic, "generate", None)  # a second generation would fail
    info = data_info(SYNTHETIC, MODEL)
    assert info.synthetic
    assert 0.8 < info.bayes_auc < 0.9
    assert info.samples == {"train": 2572, "val": 214, "test": 214}
    evaluation = build_batches(replace(SYNTHETIC, eval_batch_size=100), MODEL, "val", rank=1, world=2)
    assert [len(b) for b in evaluation] == [50, 50, 7]
    assert len(list(cache.glob("synthetic-*"))) == 1


def test_other_options_are_other_data(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(synthetic, "_make", lambda directory, key: made.append(directory))
    base = (100, 0, [10] * 26)
    for options in (base, (101, 0, [10] * 26), (100, 1, [10] * 26), (100, 0, [11] * 26)):
        synthetic.synthetic_directory(*options, path=None)
    assert len(set(made)) == 4


def test_processes_that_start_at_once_make_it_once(tmp_path):
    script = (
        "import sys; from trainers.data.synthetic import synthetic_directory\n"
        "print(synthetic_directory(2000, 0, [40] * 26, sys.argv[1]))"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "d"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    results = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, results
    assert {out.strip() for out, _ in results} == {str(tmp_path / "d")}
    assert sum("generating" in err for _, err in results) == 1
    assert json.loads((tmp_path / "d" / "generated.json").read_text())["samples"] == 2000
    assert not (tmp_path / "d" / "clicks.tsv").exists()


def test_path_of_other_data_is_kept(tmp_path):
    save(tmp_path / "real", [20])
    with pytest.raises(DataError, match="were not generated"):
        build_batches(replace(SYNTHETIC, path=str(tmp_path / "real")), MODEL, "train")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generated.json").write_text("{}")
    with pytest.raises(DataError, match="synthetic data of other options"):
        build_batches(replace(SYNTHETIC, path=str(tmp_path / "other")), MODEL, "train")


def test_criteo_with_and_without_the_check(tmp_path):
    data = ClicksConfig(kind="criteo", path=str(save(tmp_path / "d", [20, 10], rows=100)), batch_size=20)
    with pytest.raises(DataError, match="cat_0 has id"):
        next(iter(build_batches(data, MODEL, "train")))
    assert len(next(iter(build_batches(data, replace(MODEL, out_of_range="hash"), "train")))) == 20
    info = data_info(data, MODEL)
    assert (info.synthetic, info.bayes_auc, info.max_ids) == (False, None, None)


def test_multi_hot_sizes_must_agree(tmp_path):
    save(tmp_path, [20, 10])
    for day, samples in enumerate((20, 10)):
        arrays = {str(i): np.zeros((samples, 2), np.int32) for i in range(26)}
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **arrays)
    data = ClicksConfig(kind="criteo", path=str(tmp_path), batch_size=4)
    batch = next(iter(build_batches(data, replace(MODEL, multi_hot_sizes=[2] * 26), "train")))
    assert batch.sparse.values().numel() == 4 * 26 * 2
    with pytest.raises(DataError, match="multi_hot_sizes is"):
        build_batches(data, replace(MODEL, multi_hot_sizes=[2] * 25 + [3]), "train")


def test_random_fits_any_model():
    model = replace(MODEL, num_dense=5, table_rows=[9, 8], multi_hot_sizes=[4, 2])
    data = ClicksConfig(kind="random", batch_size=6, eval_batch_size=3)
    batch = next(iter(build_batches(data, model, "train", rank=1, world=4)))
    assert batch.dense.shape == (2, 5)
    assert batch.sparse.values().numel() == 2 * 6
    assert len(list(build_batches(data, model, "val"))) == 16
    assert data_info(data, model).bayes_auc == 0.5


@pytest.mark.parametrize(
    ("data", "model", "reason"),
    [
        ({"kind": "criteo"}, {}, "data.path is needed"),
        ({"kind": "other"}, {}, "allowed are criteo, synthetic and random"),
        ({"kind": "synthetic"}, {}, "data.num_samples is needed"),
        ({"kind": "synthetic", "num_samples": 9}, {"table_rows": [5] * 8}, "13 and 8; data=random fits any model"),
        ({"kind": "synthetic", "num_samples": 9}, {"multi_hot_sizes": [2] * 26}, "one id a feature"),
    ],
)
def test_bad_configs(data, model, reason):
    with pytest.raises(DataError, match=reason):
        build_batches(ClicksConfig(batch_size=4, **data), replace(MODEL, **model), "train")
