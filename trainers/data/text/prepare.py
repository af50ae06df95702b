"""From text to a directory of token files, in three phases:

    scan    find the files, count the documents, draw the splits
    train   the tokenizer, on the training split alone (BPE; the others have nothing to learn)
    encode  documents -> token files

Documents are read anew in each phase, a few at a time, so memory does not grow with the text: 12 bytes a document and, for
BPE, its distinct words are kept. The `tokenizers` library takes about 120 bytes a character while it encodes: 30 MB for
ordinary documents, 250 MB and more where they reach the default limit of a million characters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import filelock
import numpy as np
import tokenizers

from trainers.data.errors import DataError
from trainers.data.layout import META_NAME
from trainers.data.text.corpus import (
    DEFAULT_DOCUMENT_CHARACTERS,
    MAX_EXAMPLES,
    Document,
    Sources,
    find_sources,
    read_documents,
    standard_library,
)
from trainers.data.text.layout import (
    DEFAULT_SHARES,
    TOKENIZER_NAME,
    TOKENS,
    UNFINISHED_NAME,
    TextMeta,
    parse_shares,
    read_text_meta,
    split_documents,
    write_text_meta,
)
from trainers.data.text.megatron import TokenWriter, bin_path, idx_path
from trainers.data.text.tokenizer import END_OF_DOCUMENT, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

DEFAULT_BPE_VOCABULARY = 8192
_ENCODE_CHARACTERS = 1 << 20  # encoded at a time
_FINAL_NAMES = (META_NAME, TOKENIZER_NAME, bin_path(Path(TOKENS)).name, idx_path(Path(TOKENS)).name)

Progress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True)
class TextOptions:
    """What, with the text, decides the files' content."""

    tokenizer: str = "byte"  # byte | bpe | the path of a tokenizer.json
    vocabulary: int | None = None  # bpe: at most so many tokens; None = 8192
    end_of_document: str = END_OF_DOCUMENT  # its name in a tokenizer.json
    shares: list[str] = field(default_factory=lambda: list(DEFAULT_SHARES))  # of the documents: train, val, test
    split_seed: int = 0
    document_characters: int = DEFAULT_DOCUMENT_CHARACTERS  # a longer document is cut into several
    pattern: str = "*"  # names of files read in folders

    def __post_init__(self) -> None:
        parse_shares(self.shares)
        if self.document_characters < 1:
            raise DataError(f"document_characters {self.document_characters}, allowed is 1 or more")
        if self.split_seed < 0:
            raise DataError(f"split_seed {self.split_seed}, allowed is 0 or more")
        if self.tokenizer != "bpe" and self.vocabulary is not None:
            raise DataError(
                f"a vocabulary of {self.vocabulary} was asked for, but only tokenizer bpe has one to choose"
            )
        if self.tokenizer in ("byte", "bpe") and self.end_of_document != END_OF_DOCUMENT:
            raise DataError(f"end_of_document {self.end_of_document!r} can be chosen for a tokenizer.json only")


@dataclass
class Prepared:
    """A directory's content, and how long its tokens took; 0 where they were there already."""

    meta: TextMeta
    encode_s: float


def prepare_text(
    inputs: list[Path] | None,
    directory: Path,
    options: TextOptions,
    *,
    overwrite: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Prepared:
    """Tokenize `inputs` (files and folders; None = the Python standard library's sources) into `directory`.

    The files appear when they are complete, `meta.json` last: a killed call leaves none that could be mistaken for a
    result, and is simply called again. Called on finished files of the same inputs and options, it returns at once. The
    same text and options give the same bytes. DataError: unreadable input, no documents, or a directory that holds
    something else (unless `overwrite`).
    """
    for given in inputs or []:
        if given.is_dir() and directory.resolve().is_relative_to(given.resolve()):
            raise DataError(f"{directory} lies in {given}, which is read; choose a directory outside")
    sources = standard_library() if inputs is None else find_sources(inputs, options.pattern)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(directory / ".prepare.lock", timeout=0):
            finished = None if overwrite else _finished(directory, sources, options)
            if finished is not None:
                return Prepared(finished, 0.0)
            return _prepare(sources, directory, options, progress)
    except filelock.Timeout:
        raise DataError(f"{directory}: another process is preparing data there") from None


def _finished(directory: Path, sources: Sources, options: TextOptions) -> TextMeta | None:
    meta = read_text_meta(directory)
    if meta is None:
        found = [name for name in _FINAL_NAMES if (directory / name).exists()]
        if found and not (directory / UNFINISHED_NAME).exists():
            raise DataError(f"{directory} holds {found[0]}, which this command did not write; --overwrite replaces it")
        return None
    if (meta.sources, meta.options) != (sources.fingerprint(), asdict(options)):
        raise DataError(f"{directory} holds tokens of other text or options; --overwrite replaces them")
    if options.tokenizer not in ("byte", "bpe"):
        now = load_tokenizer(options.tokenizer, options.end_of_document).to_json()
        if now != (directory / TOKENIZER_NAME).read_text(encoding="utf-8"):
            raise DataError(f"{directory} holds tokens of another {options.tokenizer}; --overwrite replaces them")
    return meta


def _prepare(sources: Sources, directory: Path, options: TextOptions, progress: Progress) -> Prepared:
    fingerprint = sources.fingerprint()

    def documents(phase: str) -> Iterator[Document]:
        return _reported(read_documents(sources, options.document_characters), sources, phase, progress)

    digest, num_documents = hashlib.sha256(), 0
    for document in documents("scan"):
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
        num_documents += 1
    if not num_documents:
        raise DataError(f"no documents: all {len(sources.files)} files are empty")

    tokenizer = _tokenizer(options, num_documents, lambda: documents("train"))

    start = time.monotonic()
    with TokenWriter(directory / TOKENS, tokenizer.vocabulary) as writer:
        _encode(tokenizer, documents("encode"), writer)
        if writer.num_documents != num_documents or sources.fingerprint() != fingerprint:
            raise DataError("the text changed while it was read; prepare it again")
        (directory / UNFINISHED_NAME).touch()
        for name in _FINAL_NAMES:
            (directory / name).unlink(missing_ok=True)
        writer.finish()
    tokenizer.save(directory / TOKENIZER_NAME)
    meta = TextMeta(
        documents=num_documents,
        tokens=writer.num_tokens,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        shares=options.shares,
        split_seed=options.split_seed,
        sources=fingerprint,
        skipped={"count": len(sources.skipped), "examples": sources.skipped[:MAX_EXAMPLES]},
        options=asdict(options),
        text_sha256=digest.hexdigest(),
        versions={"numpy": np.__version__, "tokenizers": tokenizers.__version__},
    )
    write_text_meta(directory, meta)
    (directory / UNFINISHED_NAME).unlink()
    return Prepared(meta, time.monotonic() - start)


def _tokenizer(options: TextOptions, num_documents: int, documents: Callable[[], Iterator[Document]]) -> Tokenizer:
    if options.tokenizer == "byte":
        return ByteTokenizer()
    if options.tokenizer != "bpe":
        return load_tokenizer(options.tokenizer, options.end_of_document)
    for_training = np.zeros(num_documents, bool)
    for_training[split_documents(num_documents, options.shares, options.split_seed)["train"]] = True
    # Merges are found after the last document, which may take longer than reading them.
    texts = (document.text for document, use in zip(documents(), for_training, strict=False) if use)
    return train_bpe(texts, options.vocabulary or DEFAULT_BPE_VOCABULARY)


def _encode(tokenizer: Tokenizer, documents: Iterator[Document], writer: TokenWriter) -> None:
    end = np.array([tokenizer.end_of_document])
    waiting: list[str] = []
    characters = 0

    def write() -> None:
        for tokens in tokenizer.encode(waiting):
            writer.add_document(np.concatenate([tokens, end]))
        waiting.clear()

    for document in documents:
        waiting.append(document.text)
        characters += len(document.text)
        if characters >= _ENCODE_CHARACTERS:
            write()
            characters = 0
    write()


def _reported(documents: Iterator[Document], sources: Sources, phase: str, progress: Progress) -> Iterator[Document]:
    """The documents, progress in bytes of the files as stored."""
    total, before, current = sources.bytes, 0, None
    for document in documents:
        if current is not None and document.source != current:
            before += current.stat().st_size
        current = document.source
        progress(phase, min(before + document.source_offset, total), total)
        yield document
    progress(phase, total, total)
