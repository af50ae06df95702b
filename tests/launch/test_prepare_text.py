"""`launch.prepare_text` as a process: what it prints, how it ends, how much memory it takes."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainers.data.text.build import open_text
from trainers.data.text.megatron import TokenFiles


def command(*arguments: object) -> subprocess.CompletedProcess:
    full = [sys.executable, "-m", "launch.prepare_text", *map(str, arguments)]
    return subprocess.run(full, capture_output=True, text=True, timeout=120)


def test_the_standard_library_by_default(tmp_path):
    done = command("--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    pattern = r"(\d+) documents \(train (\d+), val (\d+), test 0\), (\d+) tokens, (\d+) tokens/s\nvocabulary 257, "
    documents, train, val, tokens, speed = map(int, re.search(pattern, done.stdout).groups())
    assert "vocabulary 257, end of document 256; text sha256" in done.stdout
    assert documents == train + val > 300
    assert (TokenFiles(tmp_path / "out" / "tokens").num_tokens, speed > 0) == (tokens, True)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["scan", "encode"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    again = command("--out", tmp_path / "out")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{tokens} tokens, there already" in again.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_bpe_of_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"a line {i % 9}"}) + "\n" for i in range(100))
    )
    (tmp_path / "in" / "b").write_bytes(b"\xff")
    arguments = ("--tokenizer", "bpe", "--vocab-size", 270, "--splits", "0.8,0.1,0.1", "--split-seed", 3)
    done = command(tmp_path / "in", "--out", tmp_path / "out", *arguments)
    assert done.returncode == 0, done.stderr
    assert "100 documents (train 80, val 10, test 10)" in done.stdout
    assert "vocabulary 270, end of document 0" in done.stdout
    assert "1 files left out, which are not UTF-8 text: b" in done.stdout
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["scan", "train", "encode"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--vocab-size", "0"], "allowed is 1 or more"),
        (["--tokenizer", "bpe", "--vocab-size", "100"], "byte-level BPE needs 257 or more"),
        (["--vocab-size", "300"], "only tokenizer bpe has one to choose"),
        (["--tokenizer", "bqe"], "bqe: no such file"),
        (["--splits", "0.5,0.5"], "three for train, val and test"),
        (["--split-seed", "-1"], "allowed is 0 or more"),
        (["--pattern", "*.none"], "no text files among"),
    ],
)
def test_bad_arguments(tmp_path, arguments, reason):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    done = command(tmp_path / "in", "--out", tmp_path / "out", *arguments)
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_and_started_again(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"a line {i} " * 30}) + "\n" for i in range(100_000)))
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "launch.prepare_text", str(source), "--out", str(out)]
    started = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "tokens.bin.part").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not any((out / name).exists() for name in ("tokens.bin", "tokens.idx", "meta.json"))
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert open_text(out).files.num_documents == 100_000
    assert not list(out.glob("*.part"))


PEAK = """
import sys
from launch.prepare_text import main
assert main(sys.argv[1:]) == 0
# Not getrusage: what a process inherits there from its parent is larger.
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("tokenizer", "copies"), [("byte", (6, 30)), ("bpe", (2, 12))])
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, copies):
    text = Path(json.__file__).with_name("decoder.py").read_text() * 40
    peaks = []
    for count in copies:
        source = tmp_path / f"{count}.txt"
        source.write_text(text * count)
        options = ["--tokenizer", tokenizer, "--document-characters", "50000", "--out", str(tmp_path / f"out{count}")]
        done = subprocess.run([sys.executable, "-c", PEAK, str(source), *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 16, peaks  # MB; the text grew by 12 or 5 MB, its tokens by 24 or 3 MB
    assert peaks[1] < 160, peaks
