import hashlib
import json
import shutil
from fractions import Fraction
from pathlib import Path

import filelock
import numpy as np
import pytest

from trainers.data.errors import DataError
from trainers.data.text import prepare
from trainers.data.text.layout import read_text_meta, split_documents
from trainers.data.text.megatron import TokenFiles, TokenWriter
from trainers.data.text.prepare import TextOptions, prepare_text
from trainers.data.text.tokenizer import load_tokenizer

NAMES = ["meta.json", "tokenizer.json", "tokens.bin", "tokens.idx"]
BPE = TextOptions("bpe", vocabulary=300)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(
            f"the text of file {i}, the letter ü {'and more ' * (i % 7)}" if i != 4 else ""
        )
    (folder / "more.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} <|endoftext|>"}) + "\n" for i in range(20))
    )
    (folder / "picture").write_bytes(b"\0\1")
    return folder


def texts(source: Path) -> list[str]:
    """The documents of `source`, read another way."""
    files = [(source / f"{i:02}.txt").read_text() for i in range(30)]
    return [text for text in files if text] + [f"line {i} <|endoftext|>" for i in range(20)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".prepare.lock"}


@pytest.mark.parametrize("options", [TextOptions(), BPE], ids=["byte", "bpe"])
@pytest.mark.parametrize("characters", [1, 100, 1 << 20])
def test_every_document_is_there(source, tmp_path, monkeypatch, options, characters):
    monkeypatch.setattr(prepare, "_ENCODE_CHARACTERS", characters)
    out = tmp_path / "out"
    done = prepare_text([source], out, options)
    assert sorted(contents(out)) == NAMES
    meta, files, tokenizer = done.meta, TokenFiles(out / "tokens"), load_tokenizer(out / "tokenizer.json")
    assert read_text_meta(out) == meta
    assert (meta.vocabulary, meta.end_of_document) == (tokenizer.vocabulary, tokenizer.end_of_document)
    assert (meta.documents, meta.tokens) == (files.num_documents, files.num_tokens) == (49, files.lengths.sum())
    assert files.dtype == np.uint16
    for number, text in enumerate(texts(source)):
        tokens = files.document(number).tolist()
        assert tokens.index(tokenizer.end_of_document) == len(tokens) - 1
        assert tokenizer.decode(tokens[:-1]) == text
    assert meta.skipped == {"count": 1, "examples": ["picture"]}
    digest = hashlib.sha256()
    for text in texts(source):
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    assert meta.text_sha256 == digest.hexdigest()


@pytest.mark.parametrize("options", [TextOptions(), BPE], ids=["byte", "bpe"])
def test_the_same_again_and_nothing_else_over_it(source, tmp_path, options):
    out = tmp_path / "out"
    prepare_text([source], out, options)
    before, states = contents(out), {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare_text([source], out, options).encode_s == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()}.items() >= {
        path: state for path, state in states.items() if path.name in NAMES
    }.items()
    with pytest.raises(DataError, match="other text or options; --overwrite"):
        prepare_text([source], out, TextOptions(split_seed=1))
    (source / "00.txt").write_text("changed")
    with pytest.raises(DataError, match="other text or options; --overwrite"):
        prepare_text([source], out, options)
    assert contents(out) == before
    prepare_text([source], out, options, overwrite=True)
    assert contents(out)["tokens.bin"] != before["tokens.bin"]
    prepare_text([source], tmp_path / "other", options)
    assert contents(tmp_path / "other") == contents(out)


def test_bpe_learns_from_the_training_split_alone(source, tmp_path):
    shares = ["0.5", "0.5", "0"]
    options = TextOptions("bpe", vocabulary=400, shares=shares)
    prepare_text([source], tmp_path / "a", options)
    held_out = split_documents(49, shares, 0)["val"]
    files = [i for i in range(30) if i != 4]
    for number in held_out[held_out < len(files)]:
        (source / f"{files[number]:02}.txt").write_text("zqzqzq zqzqzq")
    prepare_text([source], tmp_path / "b", options)
    assert contents(tmp_path / "a")["tokenizer.json"] == contents(tmp_path / "b")["tokenizer.json"]
    assert contents(tmp_path / "a")["tokens.bin"] != contents(tmp_path / "b")["tokens.bin"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["scan", "train", "encode", "first name", "second name", "meta"])
def test_a_kill_leaves_nothing_that_looks_finished(source, tmp_path, monkeypatch, moment):
    out, expected = tmp_path / "out", tmp_path / "expected"
    prepare_text([source], expected, BPE)

    def kill(*_: object) -> None:
        raise Killed

    # As a killed process: nothing is cleaned up.
    monkeypatch.setattr(TokenWriter, "__exit__", lambda *_: None)

    def progress(phase: str, done: int, total: int) -> None:
        if phase == moment and done > total / 2:
            raise Killed

    replace, calls = prepare.TokenWriter.finish.__globals__["os"].replace, []

    def replace_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == {"first name": 1, "second name": 2}.get(moment):
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("trainers.data.text.megatron.os.replace", replace_once)
        if moment == "meta":
            patch.setattr(prepare, "write_text_meta", kill)
        with pytest.raises(Killed):
            prepare_text([source], out, BPE, progress=progress)
    assert read_text_meta(out) is None
    if moment != "meta":
        assert not (out / "tokens.idx").exists()
    prepare_text([source], out, BPE)
    assert contents(out) == contents(expected)


def test_progress_is_bytes_of_the_files(source, tmp_path):
    calls: list[tuple[str, int, int]] = []
    prepare_text([source], tmp_path / "out", BPE, progress=lambda *call: calls.append(call))
    total = sum(path.stat().st_size for path in source.iterdir() if path.name != "picture")
    assert list(dict.fromkeys(phase for phase, _, _ in calls)) == ["scan", "train", "encode"]
    assert {all_bytes for _, _, all_bytes in calls} == {total}
    for phase in ("scan", "train", "encode"):
        done = [bytes_ for name, bytes_, _ in calls if name == phase]
        assert done == sorted(done)
        assert done[-1] == total


def test_an_existing_tokenizer(source, tmp_path):
    prepare_text([source], tmp_path / "a", BPE)
    own = tmp_path / "own.json"
    shutil.copy(tmp_path / "a" / "tokenizer.json", own)
    options = TextOptions(str(own))
    prepare_text([source], tmp_path / "b", options)
    for name in ("tokenizer.json", "tokens.bin", "tokens.idx"):
        assert contents(tmp_path / "a")[name] == contents(tmp_path / "b")[name]
    assert prepare_text([source], tmp_path / "b", options).encode_s == 0
    prepare_text([source], tmp_path / "c", TextOptions("bpe", vocabulary=290))
    shutil.copy(tmp_path / "c" / "tokenizer.json", own)
    with pytest.raises(DataError, match=r"tokens of another .*own\.json; --overwrite"):
        prepare_text([source], tmp_path / "b", options)


def test_directories_of_others_are_not_touched(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokens.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"tokens\.bin, which this command did not write"):
        prepare_text([source], out, TextOptions())
    assert contents(out) == {"tokens.bin": b"mine"}
    (out / "meta.json").write_text('{"format": "criteo-npy-1"}')
    with pytest.raises(DataError, match="format 'criteo-npy-1', text has 'text-megatron-1'"):
        prepare_text([source], out, TextOptions())
    with pytest.raises(DataError, match="is read; choose a directory outside"):
        prepare_text([tmp_path], out, TextOptions())
    with (
        filelock.FileLock(out / ".prepare.lock"),
        pytest.raises(DataError, match="another process is preparing data there"),
    ):
        prepare_text([source], out, TextOptions(), overwrite=True)
    prepare_text([source], out, TextOptions(), overwrite=True)
    assert sorted(contents(out)) == NAMES


def test_no_documents_and_changing_text(source, tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="no documents: all 1 files are empty"):
        prepare_text([tmp_path / "empty"], tmp_path / "out", TextOptions())

    def change(phase: str, done: int, total: int) -> None:
        if phase == "scan" and done == total:
            (source / "07.txt").write_text("other")

    with pytest.raises(DataError, match="the text changed while it was read"):
        prepare_text([source], tmp_path / "out", TextOptions(), progress=change)
    assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize(
    "shares", [["1", "0", "0"], ["0.95", "0.05", "0"], ["0.8", "0.1", "0.1"], ["1/3", "1/3", "1/3"]]
)
def test_splits_share_the_documents_out(count, shares):
    splits = split_documents(count, shares, 5)
    assert list(splits) == ["train", "val", "test"]
    assert sorted(np.concatenate(list(splits.values()))) == list(range(count))
    assert len(splits["train"]) >= 1
    for split, share in zip(("val", "test"), shares[1:], strict=True):
        assert len(splits[split]) == 0 if share == "0" else len(splits[split]) >= (count >= 3)
    if count == 1000:
        assert [len(s) for s in splits.values()] == pytest.approx([1000 * float(Fraction(s)) for s in shares], abs=1)
        assert splits["val"].tolist() != split_documents(count, shares, 6)["val"].tolist() or shares[1] == "0"
    assert all(
        np.array_equal(a, b) for a, b in zip(splits.values(), split_documents(count, shares, 5).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shares": ["0.5", "0.5"]}, "three for train, val and test"),
        ({"shares": ["0", "1", "0"]}, "some for train"),
        ({"shares": ["0.5", "0.6", "0"]}, "add up to 1"),
        ({"shares": ["1.5", "-0.5", "0"]}, "add up to 1"),
        ({"shares": ["a", "b", "c"]}, "add up to 1"),
        ({"document_characters": 0}, "allowed is 1 or more"),
        ({"split_seed": -1}, "allowed is 0 or more"),
        ({"vocabulary": 300}, "only tokenizer bpe has one to choose"),
        ({"tokenizer": "bpe", "end_of_document": "</s>"}, "for a tokenizer.json only"),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(DataError, match=reason):
        TextOptions(**options)
