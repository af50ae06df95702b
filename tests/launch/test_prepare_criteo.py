"""The two data commands as processes: what they print, how they end, how much memory they take."""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.prepare_criteo import rows_argument
from tests.trainers.data.clicks import contents, random_lines, write


def command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_generate_then_prepare(tmp_path):
    done = command("launch.generate_criteo", "--out", tmp_path / "a.tsv", "--samples", 3000, "--seed", 2)
    assert done.returncode == 0, done.stderr
    assert "3000 synthetic samples" in done.stdout
    with open(tmp_path / "a.tsv.gz", "wb") as file:
        file.write(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    done = command("launch.prepare_criteo", tmp_path / "a.tsv.gz", "--out", tmp_path / "out", "--splits", "0.8,0.1,0.1")
    assert done.returncode == 0, done.stderr
    assert "3000 samples in 1 day(s) (train 2400, val 300, test 300)" in done.stdout
    assert re.search(r"synthetic data, Bayes AUC 0\.8\d\d\d", done.stdout)
    assert [phase for phase in ("parse", "count", "map") if f"{phase}: done" in done.stderr] == [
        "parse",
        "count",
        "map",
    ]
    before = contents(tmp_path / "out")
    again = command(
        "launch.prepare_criteo", tmp_path / "a.tsv.gz", "--out", tmp_path / "out", "--splits", "0.8,0.1,0.1"
    )
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert contents(tmp_path / "out") == before


def test_malformed_lines(tmp_path):
    lines = random_lines(30)
    lines[4] = lines[4].replace("\t", "\tx", 1)
    source = write(tmp_path / "a.tsv", lines)
    done = command("launch.prepare_criteo", source, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {source}:5: integer feature 1 is 'x")
    done = command("launch.prepare_criteo", source, "--out", tmp_path / "out", "--max-bad-lines", 3)
    assert done.returncode == 0
    assert "29 samples" in done.stdout
    assert "1 malformed lines left out:\na.tsv:5: integer feature 1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-rows", "5,6"], "2 numbers, expected 1 or 26"),
        (["--max-rows", "many"], "neither a number"),
        (["--max-rows", "1"], "from 2 to"),
        (["--max-bad-lines", "-1"], "allowed is 0 or more"),
        (["--min-count", "0"], "allowed is 1 or more"),
        (["--splits", "a,b"], "three shares"),
        (["--splits", "0.5,0.5"], "add up to 1"),
        (["--hash-rows", "9", "--min-count", "2"], "exclude each other"),
    ],
)
def test_bad_arguments(tmp_path, arguments, reason):
    done = command("launch.prepare_criteo", write(tmp_path / "a", random_lines(3)), "--out", tmp_path / "o", *arguments)
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_a_model_file():
    models = Path(__file__).parents[2] / "configs" / "model"
    assert rows_argument(str(models / "dlrm_kaggle.yaml"))[:3] == [1460, 583, 10131227]
    assert rows_argument("7") == [7] * 26


PEAK = """
import sys
from launch.prepare_criteo import main
assert main(sys.argv[1:]) == 0
# Not getrusage: what a process inherits there from its parent is larger.
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    source = tmp_path / "a.tsv"
    done = command("launch.generate_criteo", "--out", source, "--samples", 60_000, "--rows-scale", "1")
    assert done.returncode == 0, done.stderr
    text = source.read_bytes()
    peaks = []
    for copies in (2, 10):
        with open(source, "wb") as file:
            for _ in range(copies):
                file.write(text)
        arguments = [source, "--out", tmp_path / str(copies), "--block-mb", "1", "--checkpoint-mb", "8"]
        done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 40, peaks  # MB; the input grew by 110 MB, the arrays by 75 MB
    assert peaks[1] < 200, peaks
