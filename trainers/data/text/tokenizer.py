"""Tokenizers: one token a byte, byte-level BPE trained on the text, or any `tokenizer.json`. All are stored as
`tokenizer.json`, so that the `tokenizers` and `transformers` libraries load them.

Encoding and decoding are exact inverses for the first two: any text comes back unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainers.data.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
BYTES = 256
SMALLEST_BPE = BYTES + 1  # every byte, and the end of a document
_TRAINING_CHARACTERS = 1 << 14


class Tokenizer:
    """Text to token ids and back.

    vocabulary        ids are 0 .. vocabulary - 1
    end_of_document   the id between documents; text never encodes to it, even where it spells its name
    """

    def __init__(self, library: tokenizers.Tokenizer, end_of_document: str = END_OF_DOCUMENT):
        end = library.token_to_id(end_of_document)
        if end is None:
            raise DataError(
                f"the tokenizer has no token {end_of_document!r} to end documents with; name one that it has"
            )
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.end_of_document: int = end
        # Not the number of tokens: ids may have gaps.
        self.vocabulary: int = max(library.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int64 [n_i] ids of each text, without any special token; on all cores."""
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; the end of a document shows as its name, bytes that are not UTF-8 as U+FFFD."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        return json.dumps(json.loads(self._library.to_str()), ensure_ascii=False, indent=1)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` atomically; the same tokenizer gives the same bytes."""
        temporary = path.with_name(path.name + ".part")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


class ByteTokenizer(Tokenizer):
    """Ids 0 .. 255 are the bytes of the text's UTF-8, 256 ends a document."""

    def __init__(self) -> None:
        library = tokenizers.Tokenizer(
            models.BPE({character: byte for byte, character in enumerate(_byte_names())}, [])
        )
        _split_into_bytes(library, use_regex=False)
        library.add_special_tokens([END_OF_DOCUMENT])
        super().__init__(library)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # The library would find the same ids, one merge candidate at a time.
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.int64) for text in texts]


def train_bpe(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) of up to `vocabulary` tokens: the end of a document (id 0), the 256 bytes, and
    merges. Smaller where the text has too few pairs that occur twice. The same texts give the same tokenizer; memory is
    that of the distinct words.
    """
    if vocabulary < SMALLEST_BPE:
        raise DataError(
            f"a vocabulary of {vocabulary}, byte-level BPE needs {SMALLEST_BPE} or more (bytes, end of document)"
        )
    library = tokenizers.Tokenizer(models.BPE())
    _split_into_bytes(library, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(_byte_names()),
        show_progress=False,
    )
    library.train_from_iterator(_short_pieces(texts), trainer)
    return Tokenizer(library)


def load_tokenizer(path: str | Path, end_of_document: str = END_OF_DOCUMENT) -> Tokenizer:
    """Read a `tokenizer.json`, this project's or another's. DataError: it is missing, broken, or lacks that token."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path}: not a tokenizer.json ({error})") from None
    bytewise = ByteTokenizer()
    if json.loads(library.to_str()) == json.loads(bytewise._library.to_str()) and end_of_document == END_OF_DOCUMENT:
        return bytewise
    try:
        return Tokenizer(library, end_of_document)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _short_pieces(texts: Iterator[str]) -> Iterator[str]:
    """The texts cut after line ends: the library holds 256 items at a time, which whole documents would make too many."""
    for text in texts:
        start = 0
        while start < len(text):
            limit = start + _TRAINING_CHARACTERS
            end = len(text) if limit >= len(text) else text.rfind("\n", start, limit) + 1 or limit
            yield text[start:end]
            start = end


def _split_into_bytes(library: tokenizers.Tokenizer, use_regex: bool) -> None:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    library.decoder = decoders.ByteLevel()


def _byte_names() -> list[str]:
    """GPT-2's printable character for each byte: Latin-1's own where it is visible, else one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(BYTES)]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text that UTF-8 cannot hold: {error}") from None
