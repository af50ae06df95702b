"""Lists of configurations: the shipped one covers what it should and fits a card, bad ones are refused in a line."""

import pytest
import yaml

from launch.bench.configurations import FOLDER, MOST_BYTES, MOST_RUNS, chosen, load
from launch.bench.shapes import EmbeddingShape

ENTRY = {"tables_per_rank": 1, "rows": 10, "dim": 4, "pooling": 1, "batch": 8, "dtype": "fp32", "optimizer": "sgd"}
DEFAULTS = {**ENTRY, "ranks": [2], "links": ["peer"]}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_lists_fit(path):
    found = load(path.stem)
    assert 0 < sum(len(list(c.runs())) for c in found) <= MOST_RUNS
    assert max(max(c.ranks) * c.shape.table_bytes for c in found) <= 40e9 < MOST_BYTES
    assert len({c.shape.configuration for c in found}) == len({c.shape for c in found}) == len(found)


def test_the_one_gpu_list_covers_its_axes():
    found = load("one_gpu")
    shapes = [c.shape for c in found]
    assert {run for c in found for run in c.runs()} == {(r, link) for r in (2, 4) for link in ("peer", "pinned")}
    assert {s.dim for s in shapes} == {64, 128, 256}
    assert {s.pooling for s in shapes} == {1, 20, 70, "criteo"}
    assert {s.dtype for s in shapes} == {"fp32", "bf16"}
    assert (min(s.tables_per_rank for s in shapes), max(s.tables_per_rank for s in shapes)) == (4, 32)
    assert (min(s.batch for s in shapes), max(s.batch for s in shapes)) == (1024, 65536)
    assert len(chosen(found, 4, "pinned")) == 10
    assert chosen(found, 3, "peer") == []


def test_names_say_what_the_shapes_are():
    for c in load("one_gpu"):
        s = c.shape
        bf16 = "-bf16" if s.dtype == "bf16" else ""
        pooling = s.pooling if s.pooling == "criteo" else f"p{s.pooling}"
        assert s.configuration == f"t{s.tables_per_rank}-d{s.dim}-{pooling}-b{s.batch // 1024}k{bf16}"


def test_criteo_is_the_published_mix():
    shape = EmbeddingShape(tables_per_rank=28, rows=1_000_000, dim=128, pooling="criteo", batch=4)
    assert sum(shape.bag_sizes[:26]) == 214
    assert max(shape.bag_sizes) == 100
    assert shape.bag_sizes[26:] == shape.bag_sizes[:2]
    assert shape.table_rows[:2] == [1_000_000, 39_060]
    assert shape.table_rows[5] == 3
    assert shape.lookups == 4 * (214 + 3 + 2)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"a": {"pool": 3}}, r"a: \['pool'\] unknown"),
        ({"a": {"dim": 0}}, "a: dim must be a whole number from 1 up, got '0'"),
        ({"a": {"pooling": "many"}}, "a: pooling must be a whole number from 0 up or 'criteo', got 'many'"),
        ({"a": {"dtype": "fp64"}}, "a: dtype must be one of fp32, fp16, bf16, got 'fp64'"),
        ({"a": {"links": ["nvlink"]}}, "a: needs ranks, and links out of peer, pinned"),
        ({"a": {"rows": 10**10}}, "a: 320 GB of tables in all; at most 100 fit one card"),
        ({f"n{i}": None for i in range(61)}, "61 runs .*; at most 60"),
        ([1, 2], "expected `defaults` and `configurations`"),
    ],
)
def test_bad_lists_are_one_line(entries, said, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump({"defaults": DEFAULTS, "configurations": entries}))
    with pytest.raises(ValueError, match=said):
        load(str(path))
    path.write_text("a: [")
    with pytest.raises(ValueError, match="not readable as YAML"):
        load(str(path))


def test_what_is_left_out_is_named(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump({"configurations": {"a": ENTRY}}))
    with pytest.raises(ValueError, match=r"a: \['links', 'ranks'\] missing"):
        load(str(path))
