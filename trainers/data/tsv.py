"""Criteo TSV to columns: a label, 13 integers, 26 hexadecimal strings; tab separated, fields may be empty.

pyarrow parses. What it cannot parse, or would read more generously than the format allows, goes line by line through
one regular expression instead, which finds the offending lines and says what is wrong with them.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainers.data.errors import DataError
from trainers.data.layout import NUM_DENSE, NUM_SPARSE

NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
MAX_LINE_BYTES = 1 << 16
_INT_DIGITS = 18  # always fits int64

_ALPHABET = b"0123456789abcdefABCDEF-\t\n"
_LINE = re.compile(
    rb"[01]" + rb"\t(?:-?0*[0-9]{1,%d})?" % _INT_DIGITS * NUM_DENSE + rb"\t[0-9a-fA-F]{0,8}" * NUM_SPARSE, re.ASCII
)


class Block(NamedTuple):
    """Whole lines of a file."""

    data: bytes
    offset: int  # of the byte after the block, in the decompressed file
    first_line: int  # counted from 1
    next_line: int  # the number of the line after the block
    source_offset: int  # bytes consumed of the file as stored


class BadLine(NamedTuple):
    line: int
    reason: str


class Rows(NamedTuple):
    """Parsed lines, before categories become ids."""

    labels: np.ndarray  # int32 [n]
    dense: np.ndarray  # float32 [n, 13], transformed
    values: np.ndarray  # uint32 [26, n]; 0 where missing
    missing: np.ndarray  # uint32 [n]; bit i set: category i was empty


def is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def read_blocks(path: Path, block_bytes: int, offset: int = 0, first_line: int = 1) -> Iterator[Block]:
    """Blocks of about `block_bytes` from byte `offset` (the start of line `first_line`) of the decompressed file.

    A gzip file is decompressed from its start to reach `offset`.
    """
    with open(path, "rb") as raw:
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_gzip(path) else raw  # type: ignore[assignment]
        line, rest = first_line, b""
        try:
            stream.seek(offset)
            while chunk := stream.read(block_bytes):
                end = chunk.rfind(b"\n") + 1
                if not end:
                    rest += chunk
                    if len(rest) > max(MAX_LINE_BYTES, block_bytes):
                        raise DataError(f"{path}:{line}: no line end within {len(rest)} bytes; this is not a TSV file")
                    continue
                data, rest = rest + chunk[:end], chunk[end:]
                offset += len(data)
                next_line = line + data.count(b"\n")
                yield Block(data, offset, line, next_line, raw.tell())
                line = next_line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: broken gzip stream after line {line - 1}: {error}") from None
        if rest:
            yield Block(rest, offset + len(rest), line, line + 1, raw.tell())


def parse_block(block: Block) -> tuple[Rows, list[BadLine]]:
    """The block's well-formed lines, and the others with their line number and what is wrong with them."""
    data = block.data.replace(b"\r\n", b"\n") if b"\r\n" in block.data else block.data
    rows = _parse(data)
    if rows is not None:
        return rows, []
    good, bad = [], []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), block.first_line):
        if _LINE.fullmatch(line):
            good.append(line)
        else:
            bad.append(BadLine(number, _reason(line)))
    rows = _parse(b"".join(line + b"\n" for line in good))
    if rows is None or not bad:
        raise AssertionError(f"lines {block.first_line} ff.: the parser refuses what the line format allows")
    return rows, bad


_NAMES = [str(i) for i in range(NUM_FIELDS)]
_INTEGERS = _NAMES[1 : 1 + NUM_DENSE]
_CATEGORIES = _NAMES[1 + NUM_DENSE :]


def _parse(data: bytes) -> Rows | None:
    """The rows of `data`, or None if any line is malformed."""
    # pyarrow also takes white space, 0x1f, lone carriage returns; none of their bytes occurs in a well-formed file.
    if data.translate(None, _ALPHABET):
        return None
    if not data:
        table = pa.table({n: pa.array([], t) for n, t in _types(pa.binary(8)).items()})
        return _rows(table)
    # Eight digits is what Criteo publishes; a file with shorter ones takes the general path.
    for category in (pa.binary(8), pa.binary()):
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(data),
                read_options=pyarrow.csv.ReadOptions(column_names=_NAMES, use_threads=False, block_size=len(data) + 1),
                parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=_types(category), null_values=[""], strings_can_be_null=True
                ),
            )
        except pa.ArrowInvalid:
            continue
        return _rows(table)
    return None


def _types(category: pa.DataType) -> dict[str, pa.DataType]:
    return {"0": pa.binary(1)} | dict.fromkeys(_INTEGERS, pa.int64()) | dict.fromkeys(_CATEGORIES, category)


def _rows(table: pa.Table) -> Rows | None:
    n = table.num_rows
    label = _array(table, "0")
    labels = _bytes(label, 1)[:, 0] - ord("0")  # uint8: anything but "0" and "1" is above 1
    if label.null_count or (labels > 1).any():
        return None

    dense = np.empty((n, NUM_DENSE), np.float32)
    for i, name in enumerate(_INTEGERS):
        x = _array(table, name).fill_null(0).to_numpy(zero_copy_only=False)
        if n and max(x.max(), -x.min()) >= 10**_INT_DIGITS:
            return None
        dense[:, i] = log_transform(x)

    values = np.empty((NUM_SPARSE, n), np.uint32)
    missing = np.zeros(n, np.uint32)
    for i, name in enumerate(_CATEGORIES):
        column = _array(table, name)
        if column.null_count:
            missing |= column.is_null().to_numpy(zero_copy_only=False).astype(np.uint32) << np.uint32(i)
        if column.type == pa.binary():
            if n and (pc.max(pc.binary_length(column)).as_py() or 0) > 8:
                return None
            padded = pc.ascii_lpad(column.fill_null(b"").cast(pa.string()), 8, "0")
            column = padded.cast(pa.binary()).cast(pa.binary(8))
        elif column.null_count:
            column = column.fill_null(b"00000000")
        decoded = decode_hex(_bytes(column, 8))
        if decoded is None:
            return None
        values[i] = decoded
    return Rows(labels.astype(np.int32), dense, values, missing)


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bytes(column: pa.Array, width: int) -> np.ndarray:
    """A fixed-width column's bytes, uint8 [n, width]; what a null holds is arbitrary."""
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros((0, width), np.uint8)
    whole = np.frombuffer(buffer, np.uint8, len(column) * width, column.offset * width)
    return whole.reshape(-1, width)


def log_transform(x: np.ndarray) -> np.ndarray:
    """float32 log(max(x, -2) + 3) of integers: MLPerf's log(x + 3), kept defined below its smallest value."""
    return np.log(np.maximum(x, -2) + 3.0).astype(np.float32)


def _hex_pairs() -> np.ndarray:
    """uint16 [65536]: two ASCII characters, read as a little-endian word, to their value; 256 = not hexadecimal."""
    digit = np.full(256, 256, np.uint16)
    for value, character in enumerate(b"0123456789abcdef"):
        digit[character] = value
        digit[ord(chr(character).upper())] = value
    high, low = digit[np.arange(65536) & 255], digit[np.arange(65536) >> 8]
    return np.where((high < 16) & (low < 16), high * 16 + low, 256).astype(np.uint16)


_HEX_PAIRS = _hex_pairs()


def decode_hex(text: np.ndarray) -> np.ndarray | None:
    """uint32 [n] from eight hexadecimal digits each, uint8 [n, 8]; None if any character is not one."""
    pairs = _HEX_PAIRS[np.ascontiguousarray(text).view("<u2")]
    if (pairs > 255).any():
        return None
    return pairs.astype(np.uint8).view(">u4")[:, 0].astype(np.uint32)


def _reason(line: bytes) -> str:
    """What is wrong with a line that does not match."""
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        return f"{len(fields)} fields, expected {NUM_FIELDS} (label, {NUM_DENSE} integers, {NUM_SPARSE} categories)"
    if fields[0] not in (b"0", b"1"):
        return f"label {_shown(fields[0])}, allowed are 0 and 1"
    for i, text in enumerate(fields[1 : 1 + NUM_DENSE], 1):
        if not re.fullmatch(rb"(-?0*[0-9]{1,%d})?" % _INT_DIGITS, text):
            return (
                f"integer feature {i} is {_shown(text)}, allowed is an integer of up to {_INT_DIGITS} digits or empty"
            )
    for i, text in enumerate(fields[1 + NUM_DENSE :], 1):
        if not re.fullmatch(rb"[0-9a-fA-F]*", text):
            return f"category {i} is {_shown(text)}, allowed are hexadecimal digits or empty"
        if len(text) > 8:
            return f"category {i} is {_shown(text)}, allowed are up to 8 hexadecimal digits (32 bits)"
    raise AssertionError(f"line {_shown(line)} has nothing wrong with it")


def _shown(text: bytes) -> str:
    shown = repr(text[:40].decode("utf-8", "backslashreplace"))
    return shown + "..." if len(text) > 40 else shown
