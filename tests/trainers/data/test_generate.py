import json

import numpy as np
import pytest

from trainers.data import generate as module
from trainers.data.errors import DataError
from trainers.data.generate import ClickModel, generate, mix32, scaled_rows, zipf
from trainers.data.tsv import parse_block, read_blocks

ROWS = [5, 50, 500] + [20] * 23


@pytest.fixture(autouse=True)
def few_bayes_samples(monkeypatch):
    monkeypatch.setattr(module, "BAYES_BLOCKS", 2)


def test_files_continue_and_repeat(tmp_path):
    generate(tmp_path / "whole", 70_000, 3, ROWS)
    whole = (tmp_path / "whole").read_bytes()
    assert whole.count(b"\n") == 70_000
    generate(tmp_path / "start", 1000, 3, ROWS, workers=1)
    assert whole.startswith((tmp_path / "start").read_bytes())
    generate(tmp_path / "rest", 69_000, 3, ROWS, first_sample=1000)
    assert whole == (tmp_path / "start").read_bytes() + (tmp_path / "rest").read_bytes()
    generate(tmp_path / "other", 1000, 4, ROWS)
    assert (tmp_path / "other").read_bytes() != (tmp_path / "start").read_bytes()


def test_lines_are_criteo_and_described(tmp_path):
    about = generate(tmp_path / "a.tsv", 5000, 1, ROWS)
    assert json.loads((tmp_path / "a.tsv.meta.json").read_text()) == about
    assert about["synthetic"] is True
    (block,) = read_blocks(tmp_path / "a.tsv", 1 << 24)
    rows, bad = parse_block(block)
    assert not bad
    assert int(rows.labels.sum()) == about["positives"]
    assert len({len(line.split(b"\t")) for line in block.data.splitlines()}) == 1
    for feature, distinct in enumerate(ROWS):
        present = rows.values[feature][rows.missing >> np.uint32(feature) & np.uint32(1) == 0]
        _, counts = np.unique(present, return_counts=True)
        assert len(counts) <= distinct
        assert counts.max() > 2 * np.median(counts)  # skewed
    assert rows.missing.any()


def auc(score: np.ndarray, labels: np.ndarray) -> float:
    rank = np.empty(len(score))
    rank[np.argsort(score)] = np.arange(1, len(score) + 1)
    positives = labels.sum()
    return (rank[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bayes_auc_is_that_of_the_true_probability(seed):
    model = ClickModel(seed, scaled_rows(0.001))
    stated = model.bayes_metrics()
    blocks = [model.block(i) for i in (7, 8)]
    p, y = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("probability", "labels"))
    assert abs(stated["bayes_auc"] - auc(p, y)) < 0.005
    assert abs(stated["bayes_log_loss"] + np.where(y, np.log(p), np.log1p(-p)).mean()) < 0.01
    assert abs(stated["positive_rate"] - y.mean()) < 0.01
    assert 0.8 < stated["bayes_auc"] < 0.9


def test_label_depends_on_dense_categories_and_pairs():
    model = ClickModel(0, ROWS)
    sample = model.block(0)
    terms = model._terms(sample.integers, sample.ranks, sample.category_missing)
    shares = (model._scale[:, None] * terms).var(1)
    assert shares / shares.sum() == pytest.approx([0.4, 0.4, 0.2], abs=1e-6)


def test_mix32_is_a_bijection():
    assert len(np.unique(mix32(np.arange(1 << 20, dtype=np.uint32)))) == 1 << 20


def test_zipf_follows_its_exponent():
    ranks = zipf(np.random.default_rng(0).random(1_000_000), 100, 1.2)
    counts = np.bincount(ranks, minlength=100)
    assert len(counts) == 100
    assert counts[9] / counts[39] == pytest.approx((40.5 / 10.5) ** 1.2, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((0, 0, ROWS), "samples: 0"), ((5, -1, ROWS), "seed: -1"), ((5, 0, [3]), "26 numbers")],
)
def test_bad_arguments(tmp_path, arguments, reason):
    with pytest.raises(DataError, match=reason):
        generate(tmp_path / "a", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_bad_scale():
    with pytest.raises(DataError, match="rows scale"):
        scaled_rows(0)
