from collections import Counter

import numpy as np
import pytest

from trainers.data.categories import CategoryCounter, CategoryHash, build_map


def skewed(count: int, seed: int = 0) -> np.ndarray:
    values = (np.random.default_rng(seed).zipf(1.2, count) % 2**32).astype(np.uint32)
    values[:9] = [0, 0, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**31, 2**31, 2**31]
    return values


def counted(values: np.ndarray, directory, limit: int, block: int) -> CategoryCounter:
    counter = CategoryCounter(directory, limit)
    for start in range(0, len(values), block):
        counter.add(values[start : start + block])
    return counter


@pytest.mark.parametrize("limit", [1 << 22, 1000, 50, 1])
def test_counts_are_exact_whatever_is_spilled(tmp_path, limit):
    values = skewed(20_000 if limit > 1 else 300)
    counter = counted(values, tmp_path, limit, 777)
    assert bool(counter._spilled) == (limit <= 1000)
    runs = list(counter.merged())
    found = np.concatenate([run.values for run in runs])
    assert (np.diff(found.astype(np.int64)) > 0).all()
    counts = np.concatenate([run.counts for run in runs])
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == Counter(values.tolist())
    assert max(len(run.values) for run in runs) <= max(limit, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("min_count", "max_rows"), [(1, 10**9), (3, 10**9), (1, 40), (2, 2), (10**9, 100)])
@pytest.mark.parametrize("limit", [1 << 22, 100])
def test_ids_by_count_then_value(tmp_path, min_count, max_rows, limit):
    values = skewed(5000)
    mapping = build_map(counted(values, tmp_path, limit, 512), min_count, max_rows)
    kept = sorted((-c, v) for v, c in Counter(values.tolist()).items() if c >= min_count)[: max_rows - 1]
    expected = {value: number for number, (_, value) in enumerate(kept, 1)}
    assert mapping.rows == len(expected) + 1
    unseen = np.array([123456789], np.uint32)
    queries = np.concatenate([values, unseen])
    assert mapping(queries).tolist() == [expected.get(v, 0) for v in queries.tolist()]
    assert mapping(queries).dtype == np.int32


def test_no_values_give_one_row(tmp_path):
    mapping = build_map(CategoryCounter(tmp_path), 1, 100)
    assert mapping.rows == 1
    assert mapping(np.array([5], np.uint32)).tolist() == [0]


def test_hash_leaves_id_zero_free():
    values = np.array([0, 9, 10, 2**32 - 1], np.uint32)
    assert CategoryHash(11)(values).tolist() == [1, 10, 1, 1 + (2**32 - 1) % 10]
