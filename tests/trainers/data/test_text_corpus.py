import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from trainers.data.errors import DataError
from trainers.data.text import corpus
from trainers.data.text.corpus import find_sources, read_documents, standard_library


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK", 5)


def texts(*inputs: Path, pattern: str = "*", characters: int = 1 << 20) -> list[str]:
    return [document.text for document in read_documents(find_sources(list(inputs), pattern), characters)]


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_files_folders_and_json_lines(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    (folder / "b.txt").write_bytes("zwei\r\nmit ü 漢字".encode())
    (folder / "a.jsonl").write_bytes(
        lines({"text": "one\ntwo", "id": 3}, {"text": ""}) + b"\n" + lines({"text": "three"})
    )
    (folder / "sub" / "c.md").write_text("c")
    (folder / "sub" / ".hidden" / "d.txt").write_text("hidden")
    (folder / ".e").write_text("hidden")
    (folder / "empty.txt").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "f.txt.gz").write_bytes(gzip.compress("gepackt ü".encode()))
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(lines({"text": "packed"})))
    single = tmp_path / "single"
    single.write_text("last")
    assert texts(folder, single) == [
        *("one\ntwo", "three", "zwei\r\nmit ü 漢字", "gepackt ü", "packed", "c", "last"),
    ]
    found = find_sources([folder])
    assert found.skipped == ["image.png", "latin.txt"]
    assert found.names == ["a.jsonl", "b.txt", "empty.txt", "f.txt.gz", "g.jsonl.gz", "sub/c.md"]
    assert texts(folder, pattern="*.md") == ["c"]


@pytest.mark.parametrize("characters", [1, 2, 3, 4, 7, 11, 100])
def test_long_documents_are_cut_at_line_ends(tmp_path, characters):
    text = "ab\n\nünï\n漢字漢字漢字漢字\nend of it\n" * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(lines({"text": text}))
    for name in ("a.txt", "b.jsonl"):
        parts = texts(tmp_path / name, characters=characters)
        assert "".join(parts) == text
        assert max(map(len, parts)) <= characters
        for part in parts[:-1]:
            assert part.endswith("\n") or (len(part) == characters and "\n" not in part)
    assert texts(tmp_path / "a.txt", characters=len(text)) == [text]


def test_progress_reaches_the_end_of_the_file(tmp_path):
    for name in ("a.txt", "a.txt.gz", "b.jsonl"):
        data = lines({"text": "x"}, {"text": "y"}) * 50
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        offsets = [document.source_offset for document in read_documents(find_sources([tmp_path / name]), 20)]
        assert offsets == sorted(offsets)
        assert offsets[-1] == (tmp_path / name).stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"abc\xffdef", "not UTF-8 text within 5 bytes after byte 0"),
        ("a.txt", b"abcdefgh\xc3", "not UTF-8 text within 5 bytes after byte 9"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", 'a.jsonl:1: expected an object with a string "text"'),
        ("a.jsonl", b'\n\n{"text": 3}\n', "a.jsonl:3: expected an object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: text that UTF-8 cannot hold"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not JSON"),
        ("a.gz", gzip.compress(b"abc" * 100)[:-9], "broken gzip stream"),
    ],
)
def test_a_named_file_has_to_be_text(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        texts(tmp_path / name)
    assert reason in str(caught.value)
    assert name in str(caught.value)


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 30)
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "x" * 17}) + lines({"text": "x" * 30}))
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line of more than 30 bytes"):
        texts(tmp_path / "a.jsonl")


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        texts(tmp_path / "none")
    with pytest.raises(DataError, match="no text files among"):
        texts(tmp_path)
    (tmp_path / "a").write_text("a")
    with pytest.raises(DataError, match="documents of 0 characters"):
        texts(tmp_path / "a", characters=0)


def test_fingerprint_tells_states_apart(tmp_path):
    (tmp_path / "a").write_text("a")
    before = find_sources([tmp_path]).fingerprint()
    assert find_sources([tmp_path]).fingerprint() == before
    (tmp_path / "a").write_text("b" * 2)
    after = find_sources([tmp_path]).fingerprint()
    assert after != before
    (tmp_path / "a").rename(tmp_path / "c")
    assert find_sources([tmp_path]).fingerprint() != after


def test_standard_library(monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK", 1 << 20)
    found = standard_library()
    root = Path(sysconfig.get_path("stdlib"))
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found.names)
    assert found.files == [root / name for name in found.names]
    assert len(found.names) > 300
    assert found.names == sorted(found.names, key=lambda name: tuple(name.split("/")))
    parts = {part for name in found.names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
    assert not any(name.startswith("_sysconfigdata") for name in found.names)
    first = next(read_documents(found))
    assert first.text.encode() == first.source.read_bytes()
