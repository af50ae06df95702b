"""Megatron's token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` says where sequences and documents begin.

.idx, little endian, without padding:

    9 bytes   "MMIDIDX\\0\\0"
    u64       version, 1
    u8        code of the tokens' dtype (`DTYPES`)
    u64       n, number of sequences
    u64       d, number of documents + 1
    i32 [n]   tokens a sequence
    i64 [n]   byte of the .bin where each sequence begins
    i64 [d]   0, and the sequence after each document's last

.bin: the tokens of all sequences, one after another (Megatron-LM, megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import array
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trainers.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_HEADER = struct.Struct("<QBQQ")  # after the magic
_HEADER_BYTES = len(MAGIC) + _HEADER.size
_MOST_FOR_U16 = 65500  # Megatron's limit: smaller vocabularies are stored in 16 bits
_CHECK_ROWS = 1 << 22  # entries of an index checked at a time
_INT32_MAX = 2**31 - 1


def token_dtype(vocabulary: int) -> np.dtype:
    """The dtype Megatron stores tokens of such a vocabulary in: u16 below 65500, else i32."""
    return DTYPES[8] if vocabulary < _MOST_FOR_U16 else DTYPES[4]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class TokenFiles:
    """Token files, mapped into memory and checked against each other; documents by number.

    dtype         as stored, an integer
    num_sequences, num_documents, num_tokens
    lengths       int64 [num_documents]: tokens a document, the sum over its sequences

    Opening reads the whole .idx once and nothing of the .bin; lengths and starts take 16 bytes a document. DataError: a
    file that is missing, is no such file, was cut short, or does not belong to the other.
    """

    def __init__(self, prefix: str | Path):
        prefix = Path(prefix)
        self.bin, self.idx = bin_path(prefix), idx_path(prefix)
        try:
            index_bytes, bin_bytes = self.idx.stat().st_size, self.bin.stat().st_size
            with open(self.idx, "rb") as file:
                head = file.read(_HEADER_BYTES)
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename}: no such file; both {self.bin.name} and {self.idx.name} are needed"
            ) from None
        self.dtype, self.num_sequences, entries = self._header(head, index_bytes)
        self.num_documents = entries - 1

        lengths_at = _HEADER_BYTES
        pointers_at = lengths_at + 4 * self.num_sequences
        documents_at = pointers_at + 8 * self.num_sequences
        self.num_tokens = self._check_sequences(lengths_at, pointers_at, bin_bytes)
        first_sequence = np.fromfile(self.idx, "<i8", entries, offset=documents_at)
        if first_sequence[0] != 0 or first_sequence[-1] != self.num_sequences or (np.diff(first_sequence) < 0).any():
            raise self._broken(f"its documents do not run from sequence 0 to {self.num_sequences} in order")
        # The .bin's end begins no sequence, but ends the last document.
        pointers = self._map("<i8", pointers_at, self.num_sequences)
        starts = np.full(entries, self.num_tokens, np.int64)
        begun = first_sequence < self.num_sequences
        starts[begun] = pointers[first_sequence[begun]] // self.dtype.itemsize
        self._starts = starts
        self.lengths = np.diff(starts)
        self._tokens = np.zeros(0, self.dtype)
        if self.num_tokens:
            self._tokens = np.asarray(np.memmap(self.bin, self.dtype, "r", shape=(self.num_tokens,)))

    def document(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start .. stop - 1 of a document (all of it by default), in the stored dtype; mapped, not copied."""
        first, end = (int(at) for at in self._starts[number : number + 2])
        return self._tokens[first + start : end if stop is None else min(first + stop, end)]

    def _broken(self, why: str) -> DataError:
        return DataError(f"{self.idx}: {why}; the file is damaged or was not written by Megatron")

    def _map(self, dtype: str, offset: int, rows: int) -> np.ndarray:
        return np.memmap(self.idx, dtype, "r", offset, (rows,)) if rows else np.zeros(0, dtype)

    def _header(self, head: bytes, index_bytes: int) -> tuple[np.dtype, int, int]:
        """Dtype, sequences and entries of the document index, once the file's size agrees with them."""
        if head[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self.idx}: begins with {head[: len(MAGIC)]!r}, a Megatron index with {MAGIC!r}")
        if len(head) < _HEADER_BYTES:
            raise DataError(f"{self.idx}: cut short: {len(head)} bytes, the header alone has {_HEADER_BYTES}")
        version, code, sequences, entries = _HEADER.unpack(head[len(MAGIC) :])
        if version != VERSION:
            raise DataError(f"{self.idx}: version {version} of Megatron's index, only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{self.idx}: dtype code {code}, allowed are {', '.join(map(str, DTYPES))}")
        if DTYPES[code].kind == "f":
            raise DataError(f"{self.idx}: holds {DTYPES[code]} values; tokens are integers")
        if not entries:
            raise self._broken("its document index is empty, where it should hold at least a 0")
        expected = _HEADER_BYTES + 12 * sequences + 8 * entries
        if index_bytes == expected + sequences and sequences:
            raise DataError(f"{self.idx}: a multimodal index (one mode a sequence); only text can be read")
        if index_bytes != expected:
            change = "cut short" if index_bytes < expected else "too long"
            raise DataError(
                f"{self.idx}: {change}: {index_bytes} bytes, but {sequences} sequences and {entries - 1} documents "
                f"take {expected}"
            )
        return DTYPES[code], sequences, entries

    def _check_sequences(self, lengths_at: int, pointers_at: int, bin_bytes: int) -> int:
        """Number of tokens, once every sequence is known to begin where the one before ends."""
        lengths = self._map("<i4", lengths_at, self.num_sequences)
        pointers = self._map("<i8", pointers_at, self.num_sequences)
        end = 0
        for first in range(0, self.num_sequences, _CHECK_ROWS):
            part = np.asarray(lengths[first : first + _CHECK_ROWS], np.int64)
            if (part < 0).any():
                raise self._broken(f"sequence {first + int((part < 0).argmax())} has a negative length")
            ends = end + np.cumsum(part * self.dtype.itemsize)
            wrong = pointers[first : first + _CHECK_ROWS] != np.append(end, ends[:-1])
            if wrong.any():
                raise self._broken(
                    f"sequence {first + int(wrong.argmax())} does not begin where the one before it ends"
                )
            end = int(ends[-1])
        if end != bin_bytes:
            change = "cut short" if bin_bytes < end else "too long"
            raise DataError(
                f"{self.bin}: {change}: {bin_bytes} bytes, its index {self.idx.name} describes {end} "
                f"({end // self.dtype.itemsize} tokens of {self.dtype})"
            )
        return end // self.dtype.itemsize


class TokenWriter:
    """Writes token files. Their final names appear at `finish`, and only whole; 4 bytes a sequence stay in memory.

    Used as a context manager, what was not finished is removed at its end.
    """

    def __init__(self, prefix: str | Path, vocabulary: int):
        prefix = Path(prefix)
        if vocabulary < 1 or vocabulary - 1 > _INT32_MAX:
            raise DataError(f"a vocabulary of {vocabulary} tokens, allowed are 1 to {_INT32_MAX + 1}")
        self.dtype, self._vocabulary = token_dtype(vocabulary), vocabulary
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._bin_part, self._idx_part = (path.with_name(path.name + ".part") for path in (self._bin, self._idx))
        self._lengths = array.array("i")
        self._documents = array.array("q", [0])
        self._file = open(self._bin_part, "wb")  # noqa: SIM115 (closed by finish or discard)
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_document(self, *sequences: np.ndarray) -> None:
        """Append a document of integer sequences [n_i]. DataError: a token outside the vocabulary."""
        for tokens in sequences:
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise DataError(f"a sequence is {tokens.dtype} {list(tokens.shape)}, expected integers [n]")
            if len(tokens) > _INT32_MAX:
                raise DataError(f"a sequence of {len(tokens)} tokens, the format allows {_INT32_MAX}")
            if len(tokens) and (tokens.min() < 0 or tokens.max() >= self._vocabulary):
                wrong = tokens.min() if tokens.min() < 0 else tokens.max()
                raise DataError(f"token {wrong}, allowed are 0 .. {self._vocabulary - 1} (the vocabulary)")
            self._file.write(tokens.astype(self.dtype).tobytes())
            self._lengths.append(len(tokens))
            self.num_tokens += len(tokens)
        self._documents.append(len(self._lengths))

    def finish(self) -> None:
        """Write the index and give both files their names, the index last."""
        _sync_and_close(self._file)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        with open(self._idx_part, "wb") as file:
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            file.write(MAGIC + _HEADER.pack(VERSION, code, len(lengths), len(self._documents)))
            file.write(lengths.astype("<i4").data)
            for part in _pointers(lengths, self.dtype.itemsize):
                file.write(part.data)
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8").data)
            _sync_and_close(file)
        self._idx.unlink(missing_ok=True)  # an old index must not meet the new tokens
        os.replace(self._bin_part, self._bin)
        os.replace(self._idx_part, self._idx)

    def discard(self) -> None:
        """Remove what was written since; nothing happens after `finish`."""
        self._file.close()
        for path in (self._bin_part, self._idx_part):
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()


def _pointers(lengths: np.ndarray, item_bytes: int) -> Iterable[np.ndarray]:
    """The byte where each sequence begins, '<i8', some at a time."""
    end = 0
    for first in range(0, len(lengths), _CHECK_ROWS):
        ends = end + np.cumsum(lengths[first : first + _CHECK_ROWS].astype(np.int64) * item_bytes)
        yield np.append(end, ends[:-1]).astype("<i8")
        end = int(ends[-1])


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
