"""From what a run says of its text to batches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np

from trainers.data.errors import DataError
from trainers.data.layout import SPLITS
from trainers.data.text.batches import TextBatches
from trainers.data.text.layout import DEFAULT_SHARES, TOKENS, UNFINISHED_NAME, read_text_meta, split_documents
from trainers.data.text.megatron import TokenFiles, idx_path
from trainers.data.text.packing import PackedDocuments
from trainers.data.text.prepare import TextOptions, prepare_text

CACHE = Path("outputs/data")
LOCK_TIMEOUT_S = 1800


@dataclass
class TextData:
    """Opened token files, and what has to be known of them.

    vocabulary    None where it is not known (files without this project's meta.json)
    ends_stored   every document ends in `end_of_document`
    documents     a split's document numbers
    """

    name: str
    files: TokenFiles
    vocabulary: int | None
    end_of_document: int
    ends_stored: bool
    documents: dict[str, np.ndarray]

    def split_tokens(self) -> dict[str, int]:
        """Tokens of each split, ends of documents included."""
        added = 0 if self.ends_stored else 1
        lengths = {split: self.files.lengths[numbers] for split, numbers in self.documents.items()}
        return {split: int((found + added)[found > 0].sum()) for split, found in lengths.items()}


def open_text(directory: str | Path) -> TextData:
    """A directory that `prepare_text` made. DataError: there is none, or it is unfinished or damaged."""
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; `python -m launch.prepare_text --out {directory}` makes one")
    meta = read_text_meta(directory)
    if meta is None:
        unfinished = (directory / UNFINISHED_NAME).exists() or any(directory.glob("*.part"))
        why = "its preparation was not finished; run that command again" if unfinished else "expected meta.json"
        raise DataError(f"{directory} holds no prepared text: {why}")
    files = TokenFiles(directory / TOKENS)
    if (files.num_documents, files.num_tokens) != (meta.documents, meta.tokens):
        raise DataError(
            f"{files.idx}: {files.num_documents} documents of {files.num_tokens} tokens, meta.json says {meta.documents} "
            f"of {meta.tokens}; prepare the text again"
        )
    return TextData(
        directory.name,
        files,
        meta.vocabulary,
        meta.end_of_document,
        True,
        meta.splits(),
    )


def open_megatron(
    prefix: str | Path,
    end_of_document: int,
    *,
    ends_stored: bool,
    shares: list[str] | None = None,
    split_seed: int = 0,
) -> TextData:
    """`<prefix>.bin` and `<prefix>.idx` of any origin; `ends_stored` is true for files made with Megatron's --append-eod."""
    if end_of_document < 0:
        raise DataError(f"end_of_document {end_of_document}, allowed is 0 or more")
    files = TokenFiles(prefix)
    splits = split_documents(files.num_documents, shares or list(DEFAULT_SHARES), split_seed)
    return TextData(Path(prefix).name, files, None, end_of_document, ends_stored, splits)


def is_megatron_prefix(path: str | Path) -> bool:
    """Whether `path` names token files rather than a directory that `prepare_text` made."""
    return not Path(path).is_dir() and idx_path(Path(path)).is_file()


def standard_library_directory(tokenizer: str = "byte", vocabulary: int | None = None, cache: Path = CACHE) -> Path:
    """The Python standard library's sources, tokenized: a directory in `cache`, made at the first call.

    Any number of processes may call this at once: one prepares, the others wait. Another Python version gets its own.
    """
    options = TextOptions(tokenizer, vocabulary)
    if tokenizer not in ("byte", "bpe"):
        raise DataError(f"tokenizer {tokenizer!r}, allowed for the standard library's sources are byte and bpe")
    python = ".".join(map(str, sys.version_info[:3]))
    name = f"stdlib-{python}-{tokenizer}" + (f"-{vocabulary}" if vocabulary else "")
    directory = (cache / name).resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(directory.with_name(f".{name}.lock"), timeout=LOCK_TIMEOUT_S):
            if not directory.is_dir() or read_text_meta(directory) is None:
                print(f"tokenizing the Python standard library's sources in {directory}", file=sys.stderr, flush=True)
                prepare_text(None, directory, options)
    except filelock.Timeout:
        raise DataError(f"{directory}: another process has been preparing it for {LOCK_TIMEOUT_S} s") from None
    return directory


def build_text_batches(
    data: TextData,
    split: str,
    batch_size: int,
    length: int,
    *,
    vocabulary: int | None = None,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    start_step: int = 0,
) -> TextBatches:
    """Batches of `split` (train: endless; val, test: once through, in order) for data-parallel rank `rank` of `world`.

    `vocabulary`: the model's; tokens are checked against it. None = the data's own. DataError: a split without
    documents, a model with fewer tokens than the data, or as `TextBatches`.
    """
    if split not in SPLITS:
        raise DataError(f"split {split!r}, allowed are {', '.join(SPLITS)}")
    least = data.vocabulary or data.end_of_document + 1
    vocabulary = vocabulary or data.vocabulary
    if vocabulary is None:
        raise DataError(f"{data.files.idx}: the vocabulary has to be given, token files do not say it")
    if vocabulary < least:
        raise DataError(f"the model has {vocabulary} tokens, the text of {data.name} needs {least} or more")
    if not len(data.documents[split]):
        counts = {name: len(documents) for name, documents in data.documents.items()}
        raise DataError(f"{data.name}: split {split} has no documents ({counts})")
    training = split == "train"
    packed = PackedDocuments(
        data.files,
        data.documents[split],
        length,
        end_of_document=data.end_of_document,
        ends_stored=data.ends_stored,
        seed=seed,
        shuffle=shuffle and training,
    )
    return TextBatches(
        packed,
        batch_size,
        vocabulary=vocabulary,
        rank=rank,
        world=world,
        seed=seed,
        shuffle=shuffle and training,
        start_step=start_step,
        epochs=None if training else 1,
    )
