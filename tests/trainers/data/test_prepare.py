import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainers.data.clicks import contents, load, naive, random_lines, write
from trainers.data import prepare as prepare_module
from trainers.data.errors import DataError
from trainers.data.layout import META_NAME
from trainers.data.options import PrepareOptions
from trainers.data.prepare import prepare


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(prepare_module, "MAP_BLOCK_ROWS", 64)
    monkeypatch.setattr(prepare_module, "COUNT_BLOCK_ROWS", 100)


def run(sources: list[Path], out: Path, *, block_bytes: int = 20_000, **options):
    """prepare() with every keyword where it belongs."""
    names = ("max_bad_lines", "workers", "checkpoint_bytes", "overwrite")
    keywords = {name: options.pop(name) for name in names if name in options}
    return prepare(sources, out, PrepareOptions(**options), block_bytes=block_bytes, **keywords)


@pytest.mark.parametrize("digits", [1, 8])
@pytest.mark.parametrize(("min_count", "max_rows"), [(1, 1000), (3, 1000), (1, 7), (2, 2)])
def test_equals_plain_python(tmp_path, digits, min_count, max_rows):
    days = [random_lines(n, seed, digits) for seed, n in enumerate((300, 1, 201))]
    sources = [write(tmp_path / f"day_{i}", lines) for i, lines in enumerate(days)]
    meta = run(sources, tmp_path / "out", min_count=min_count, max_rows=[max_rows] * 26)
    expected, rows = naive(days, [(0, 300), (0, 1), (0, 0)], min_count, max_rows)
    for day, arrays in enumerate(expected):
        for found, wanted in zip(load(tmp_path / "out", day), arrays, strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(found, wanted)
    assert meta.table_rows == rows
    assert meta.max_ids == np.max([arrays[1].max(0) for arrays in expected], 0).tolist()
    assert meta.samples == [300, 1, 201]
    assert meta.positives == sum(int(arrays[2].sum()) for arrays in expected)
    assert not (tmp_path / "out" / ".prepare").exists()


def test_all_rows_count_when_asked(tmp_path):
    days = [random_lines(100, 1), random_lines(100, 2)]
    sources = [write(tmp_path / f"day_{i}", lines) for i, lines in enumerate(days)]
    meta = run(sources, tmp_path / "out", count_from="all")
    expected, rows = naive(days, [(0, 100), (0, 100)])
    assert meta.table_rows == rows
    np.testing.assert_array_equal(load(tmp_path / "out", 1)[1], expected[1][1])


def test_hashing(tmp_path):
    lines = random_lines(100)
    meta = run([write(tmp_path / "a", lines)], tmp_path / "out", hash_rows=[50] * 25 + [2])
    values = [line.split("\t")[14:] for line in lines]
    expected = [
        [(1 + int(x, 16) % (49 if i < 25 else 1)) if x else 0 for i, x in enumerate(fields)] for fields in values
    ]
    assert load(tmp_path / "out", 0)[1].tolist() == expected
    assert meta.table_rows == [50] * 25 + [2]


def test_bytes_depend_on_neither_blocks_workers_nor_compression(tmp_path):
    lines = random_lines(500)
    plain = write(tmp_path / "a", lines)
    reference = None
    for number, (block, workers) in enumerate([(2000, 1), (7000, 3), (1 << 20, 2)]):
        run([plain], tmp_path / str(number), block_bytes=block, workers=workers, checkpoint_bytes=10_000)
        found = contents(tmp_path / str(number))
        assert reference is None or found == reference
        reference = found
    packed = tmp_path / "b.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    run([packed], tmp_path / "gz", block_bytes=5000)
    arrays = contents(tmp_path / "gz")
    del arrays[META_NAME], reference[META_NAME]  # names another source
    assert arrays == reference


KILLED = """
import os, signal, sys
from pathlib import Path
from trainers.data import prepare as module
from trainers.data.options import PrepareOptions

phase, number = sys.argv[1], int(sys.argv[2])
calls = 0

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def progress(current, done, total):
    global calls
    calls += current == phase
    if calls == number:
        kill()

if phase == "state":
    save = module.write_json
    def write_json(*arguments):
        global calls
        calls += 1
        kill() if calls == number else save(*arguments)
    module.write_json = write_json
if phase == "finish":
    replace = os.replace
    def rename(source, target):
        replace(source, target)
        progress("finish" if str(source).endswith(".npy.part") and "maps" not in str(source) else "", 0, 0)
    os.replace = rename
module.MAP_BLOCK_ROWS, module.COUNT_BLOCK_ROWS = 64, 100
module.prepare([Path(a) for a in sys.argv[4:]], Path(sys.argv[3]), PrepareOptions(), max_bad_lines=5,
               block_bytes=20_000, checkpoint_bytes=50_000, progress=progress)
"""


@pytest.mark.parametrize("packed", [False, True])
def test_killed_anywhere_ends_in_the_same_bytes(tmp_path, packed):
    sources = []
    for day in range(2):
        lines = random_lines(700, day)
        lines[100 * day + 11] = lines[650 + day] = "broken"  # before and after the first checkpoint
        sources.append(write(tmp_path / f"day_{day}", lines))
        if packed:
            sources[-1].write_bytes(gzip.compress(sources[-1].read_bytes()))
    run(sources, tmp_path / "whole", max_bad_lines=5)
    out = tmp_path / "killed"
    # One after another on the same directory: each goes on where the last was killed.
    points = [
        ("parse", 2),
        ("parse", 5),
        ("state", 2),
        ("parse", 9),
        ("count", 1),
        ("count", 9),
        ("map", 3),
        ("state", 2),
    ]
    points += [("map", 5), ("finish", 1), ("finish", 2)]
    if packed:
        points = [("parse", 5), ("parse", 9), ("map", 3)]
    for phase, number in points:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, phase, str(number), out, *sources], capture_output=True, timeout=60
        )
        assert done.returncode == -signal.SIGKILL, (phase, number, done.stderr)
        assert not (out / META_NAME).exists()
    assert (out / ".prepare" / "state.json").exists()
    meta = run(sources, out, max_bad_lines=5)
    assert contents(out) == contents(tmp_path / "whole")
    assert meta.bad_lines["count"] == 4


def test_going_on_skips_what_is_done(tmp_path):
    source = write(tmp_path / "a", random_lines(700))
    arguments = [sys.executable, "-c", KILLED, "parse", "6", tmp_path / "out", source]
    assert subprocess.run(arguments, timeout=60).returncode == -signal.SIGKILL
    state = json.loads((tmp_path / "out" / ".prepare" / "state.json").read_text())
    assert 0 < state["days"][0]["rows"] < 700
    with open(source, "r+b") as file:  # the same size and time, but the part that was read is gone
        status = os.stat(source)
        file.write(b"x" * state["days"][0]["offset"])
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run([source], tmp_path / "out").samples == [700]


def test_malformed_line_stops_with_file_and_line(tmp_path):
    lines = random_lines(100)
    lines[41] = "x"
    lines[70] = "y\tz"
    source = write(tmp_path / "a.tsv", lines)
    with pytest.raises(DataError, match=r"a\.tsv:42: 1 fields, expected 40.*--max-bad-lines"):
        run([source], tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.tsv:71: 2 fields.*2 malformed lines so far, at most 1"):
        run([source], tmp_path / "out", max_bad_lines=1)
    meta = run([source], tmp_path / "out", max_bad_lines=2)  # goes on from the stop
    assert meta.samples == [98]
    assert meta.bad_lines["count"] == 2
    assert [e.split(":")[:2] for e in meta.bad_lines["examples"]] == [["a.tsv", "42"], ["a.tsv", "71"]]
    del lines[70], lines[41]
    expected, _ = naive([lines], [(0, 84)])
    for found, wanted in zip(load(tmp_path / "out", 0), expected[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_directory_of_something_else_is_kept(tmp_path):
    source = write(tmp_path / "a", random_lines(50))
    out = tmp_path / "out"
    run([source], out)
    before = contents(out)
    run([source], out)  # finished: nothing to do
    assert contents(out) == before
    with pytest.raises(DataError, match="holds data of other sources or options"):
        run([source], out, min_count=2)
    run([source], out, min_count=2, overwrite=True)
    assert contents(out) != before
    (out / META_NAME).unlink()
    with pytest.raises(DataError, match=r"day_0_dense\.npy .* did not write"):
        run([source], out)


def test_changed_source_is_not_continued(tmp_path):
    lines = random_lines(300)
    source = write(tmp_path / "a", [*lines, "broken"])
    with pytest.raises(DataError, match=":301:"):
        run([source], tmp_path / "out", checkpoint_bytes=1)
    write(source, lines)
    with pytest.raises(DataError, match="unfinished preparation of other sources"):
        run([source], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_count": 0}, "min_count"),
        ({"max_rows": [1] * 26}, "max_rows"),
        ({"max_rows": [10] * 25}, "26 numbers"),
        ({"hash_rows": [10] * 26, "min_count": 2}, "exclude each other"),
        ({"fractions": ["1/2", "1/4", "1/3"]}, "add up to 1"),
        ({"count_from": "val"}, "allowed are train and all"),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(DataError, match=reason):
        PrepareOptions(**options)


def test_empty_and_absent_sources(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty: no samples"):
        run([tmp_path / "empty"], tmp_path / "out")
    with pytest.raises(DataError, match="nowhere: no such file"):
        run([tmp_path / "nowhere"], tmp_path / "out")


def test_synthetic_mark_is_carried(tmp_path):
    generated, other, real = (write(tmp_path / name, random_lines(20, i)) for i, name in enumerate("abc"))
    for path, auc in ((generated, 0.85), (other, 0.8)):
        path.with_name(path.name + ".meta.json").write_text(json.dumps({"synthetic": True, "bayes_auc": auc}))
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(generated.read_bytes()))
    found = {}
    cases = {"one": [generated], "gz": [packed], "two": [generated, other], "mixed": [generated, real], "real": [real]}
    for name, sources in cases.items():
        meta = run(sources, tmp_path / f"out_{name}")
        found[name] = (meta.synthetic, meta.bayes_auc)
    assert found == {
        "one": (True, 0.85),
        "gz": (True, 0.85),
        "two": (True, None),
        "mixed": (True, None),
        "real": (False, None),
    }
