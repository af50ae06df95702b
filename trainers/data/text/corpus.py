"""Where documents come from: text files, JSON lines, folders of them, or the Python standard library's own sources."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainers.data.errors import DataError

JSON_LINES = (".jsonl", ".jsonl.gz")
MAX_LINE_BYTES = 256 << 20  # of JSON: a document has to be parsed in one piece
DEFAULT_DOCUMENT_CHARACTERS = 1 << 20
MAX_EXAMPLES = 20  # files left out that are named
_CHUNK = 1 << 20

# Parts of the standard library that systems ship separately, if at all; without them machines differ less.
_OPTIONAL = {"ensurepip", "distutils", "idlelib", "lib2to3", "test", "tkinter", "turtledemo"}
_TEST_FOLDERS = {"test", "tests"}


class Document(NamedTuple):
    """A document, or a part of one too long."""

    text: str
    source: Path
    source_offset: int  # bytes of the file, as stored, that are read


@dataclass
class Sources:
    """Files in the order they are read. `names` are what stays of their paths: relative to the folder they were found in."""

    files: list[Path]
    names: list[str]
    skipped: list[str] = field(default_factory=list)  # in folders, but no text

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> dict[str, Any]:
        """What tells these files, in this state, from others."""
        digest = hashlib.sha256()
        for path, name in zip(self.files, self.names, strict=True):
            about = path.stat()
            digest.update(f"{name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
        return {"files": len(self.files), "bytes": self.bytes, "sha256": digest.hexdigest()}


def find_sources(inputs: list[Path], pattern: str = "*") -> Sources:
    """The files of `inputs`: files as given, folders searched for names that match `pattern`, sorted by path.

    In folders, hidden files and files that are not UTF-8 text are left out (the latter are in `skipped`); a file that is
    named itself must be text.
    """
    found = Sources([], [])
    for given in inputs:
        if given.is_dir():
            for path in sorted(given.rglob(pattern), key=lambda path: path.relative_to(given).parts):
                name = path.relative_to(given)
                if not path.is_file() or any(part.startswith(".") for part in name.parts):
                    continue
                _add_if_text(found, path, name.as_posix())
        elif given.is_file():
            found.files.append(given)
            found.names.append(given.name)
        else:
            raise DataError(f"{given}: no such file or folder")
    if not found.files:
        raise DataError(f"no text files among {', '.join(map(str, inputs))} (names matching {pattern!r})")
    return found


def standard_library() -> Sources:
    """This Python's standard library: its *.py in UTF-8, sorted; without tests, installed packages, modules written for
    this machine, and parts that systems leave out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = Sources([], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).parts
        top = parts[0].removesuffix(".py")
        # Machine-specific modules (_sysconfigdata_...) and site-packages are no names of the standard library.
        if top in sys.stdlib_module_names and top not in _OPTIONAL and not _TEST_FOLDERS & set(parts[:-1]):
            _add_if_text(found, path, "/".join(parts))
    if not found.files:
        raise DataError(f"{root} holds no sources of Python's standard library; name text files to read instead")
    return found


def read_documents(sources: Sources, document_characters: int = DEFAULT_DOCUMENT_CHARACTERS) -> Iterator[Document]:
    """Every document, in order: a text file is one, a line of JSON lines is one (its "text").

    What is longer than `document_characters` becomes several documents, cut after the last line end that fits (or, in a
    line longer than that, anywhere). Empty ones are left out. Files may be gzip. DataError names the file (and line).
    """
    if document_characters < 1:
        raise DataError(f"documents of {document_characters} characters, allowed is 1 or more")
    for path in sources.files:
        read = _json_lines if path.name.endswith(JSON_LINES) else _text
        try:
            with open(path, "rb") as raw:
                stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if _is_gzip(raw) else raw  # type: ignore[assignment]
                for text in read(stream, path, document_characters):
                    yield Document(text, path, raw.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: broken gzip stream ({error})") from None


def _text(stream: IO[bytes], path: Path, most: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, done = "", 0
    while True:
        chunk = stream.read(_CHUNK)
        try:
            rest += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 text within {_CHUNK} bytes after byte {done} ({error.reason})"
            ) from None
        done += len(chunk)
        # Beyond `most`, what is here cannot be the document's last part.
        while len(rest) > most:
            end = rest.rfind("\n", 0, most) + 1 or most
            yield rest[:end]
            rest = rest[end:]
        if not chunk:
            break
    if rest:
        yield rest


def _json_lines(stream: IO[bytes], path: Path, most: int) -> Iterator[str]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{path}:{number}: expected an object with a string "text"')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{path}:{number}: text that UTF-8 cannot hold ({error.reason})") from None
        while len(text) > most:
            end = text.rfind("\n", 0, most) + 1 or most
            yield text[:end]
            text = text[end:]
        if text:
            yield text


def _add_if_text(found: Sources, path: Path, name: str) -> None:
    if _is_text(path):
        found.files.append(path)
        found.names.append(name)
    else:
        found.skipped.append(name)


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as raw:
        if _is_gzip(raw):
            return True  # to be read; if it holds no text, that is an error there
        try:
            while chunk := raw.read(_CHUNK):
                if b"\0" in chunk:
                    return False
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _is_gzip(raw: IO[bytes]) -> bool:
    found = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return found
