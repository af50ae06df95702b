"""Token files, against an independent reading and writing of Megatron's format with struct and numpy."""

import struct
from pathlib import Path

import numpy as np
import pytest

from trainers.data.errors import DataError
from trainers.data.text import megatron
from trainers.data.text.megatron import TokenFiles, TokenWriter

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
DOCUMENTS = [[[5, 6, 7]], [[1], [], [2, 3]], [], [[]], [[9] * 1000], [[4, 0]]]


def reference_bytes(documents: list[list[list[int]]], dtype: str) -> tuple[bytes, bytes]:
    """.bin and .idx, built one value at a time."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(boundaries))
    at = 0
    pointers = []
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * np.dtype(dtype).itemsize
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", boundary) for boundary in boundaries)
    return tokens, index


def place(prefix: Path, tokens: bytes, index: bytes) -> Path:
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def write(prefix: Path, documents: list[list[list[int]]], vocabulary: int) -> Path:
    with TokenWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.add_document(*(np.array(sequence, np.int64) for sequence in document))
        writer.finish()
    return prefix


def random_documents(seed: int, largest: int, count: int = 60) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, largest, rng.integers(0, 9)).tolist() for _ in range(rng.integers(0, 4))] for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (1 << 31, "int32")]
)
@pytest.mark.parametrize("documents", [DOCUMENTS, [], [[]], random_documents(0, 200)])
def test_written_bytes_are_the_formats(tmp_path, monkeypatch, documents, vocabulary, dtype):
    monkeypatch.setattr(megatron, "_CHECK_ROWS", 7)
    prefix = write(tmp_path / "a.b", documents, vocabulary)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]
    assert (Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()) == reference_bytes(documents, dtype)


def test_largest_token_of_each_width_survives(tmp_path):
    for vocabulary in (65499, 65500, 1 << 31):
        prefix = write(tmp_path / str(vocabulary), [[[0, vocabulary - 1]]], vocabulary)
        assert TokenFiles(prefix).document(0).tolist() == [0, vocabulary - 1]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("documents", [DOCUMENTS, [], [[]], random_documents(1, 100)])
def test_reads_what_is_there(tmp_path, monkeypatch, documents, dtype):
    monkeypatch.setattr(megatron, "_CHECK_ROWS", 7)
    small = [[[token % 128 for token in sequence] for sequence in document] for document in documents]
    files = TokenFiles(place(tmp_path / "x", *reference_bytes(small, dtype)))
    flat = [[token for sequence in document for token in sequence] for document in small]
    assert files.dtype == np.dtype(dtype)
    assert files.num_documents == len(small)
    assert files.num_sequences == sum(map(len, small))
    assert files.num_tokens == sum(map(len, flat))
    assert files.lengths.tolist() == list(map(len, flat))
    for number, tokens in enumerate(flat):
        assert files.document(number).tolist() == tokens
        assert files.document(number, 1, 3).tolist() == tokens[1:3]
        assert files.document(number, 1, 10**9).tolist() == tokens[1:]


def test_every_truncation_is_found(tmp_path):
    tokens, index = reference_bytes([[[1, 2], [3]], [[4]]], "uint16")
    for length in range(len(index)):
        with pytest.raises(DataError, match=r"x\.idx.*(cut short|begins with)"):
            TokenFiles(place(tmp_path / "x", tokens, index[:length]))
    for length in range(len(tokens)):
        with pytest.raises(DataError, match=r"x\.bin: cut short"):
            TokenFiles(place(tmp_path / "x", tokens[:length], index))
    with pytest.raises(DataError, match=r"x\.bin: too long: 10 bytes"):
        TokenFiles(place(tmp_path / "x", tokens + b"\0\0", index))


def test_no_flipped_byte_of_the_index_is_followed_outside_the_tokens(tmp_path):
    tokens, index = reference_bytes(random_documents(2, 100, 6), "uint16")
    for at in range(len(index)):
        for value in (0, 1, 127, 255):
            changed = index[:at] + bytes([value]) + index[at + 1 :]
            try:
                files = TokenFiles(place(tmp_path / "x", tokens, changed))
            except DataError:
                continue
            # What passes describes these tokens: other boundaries of documents, or a dtype of the same size.
            found = np.concatenate([files.document(i) for i in range(files.num_documents)])
            assert found.tobytes() == tokens


def test_other_files_are_named(tmp_path):
    tokens, index = reference_bytes(DOCUMENTS, "int32")

    def opened(changed: bytes, tokens: bytes = tokens) -> None:
        TokenFiles(place(tmp_path / "x", tokens, changed))

    with pytest.raises(DataError, match=r"begins with b'PK.*', a Megatron index with b'MMIDIDX"):
        opened(b"PK\3\4" + index[4:])
    with pytest.raises(DataError, match="version 2 of Megatron's index, only 1"):
        opened(index[:9] + struct.pack("<Q", 2) + index[17:])
    with pytest.raises(DataError, match="dtype code 9, allowed are 1, 2"):
        opened(index[:17] + b"\x09" + index[18:])
    with pytest.raises(DataError, match="float32 values; tokens are integers"):
        opened(index[:17] + b"\x07" + index[18:])
    with pytest.raises(DataError, match="multimodal"):
        opened(index + bytes(sum(map(len, DOCUMENTS))))
    with pytest.raises(DataError, match="too long"):
        opened(index + b"\0")
    with pytest.raises(DataError, match="do not run from sequence 0"):
        opened(index[:-8] + struct.pack("<q", 1))
    other = reference_bytes([[[1] * 99]], "int32")[0]
    with pytest.raises(DataError, match=r"x\.bin: cut short: 396 bytes, its index x.idx describes"):
        opened(index, other)
    with pytest.raises(DataError, match=r"y\.idx: no such file; both y\.bin and y\.idx"):
        TokenFiles(tmp_path / "y")


def test_what_the_writer_refuses_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match=r"token 10, allowed are 0 \.\. 9"), TokenWriter(tmp_path / "a", 10) as writer:
        writer.add_document(np.array([3, 10]))
    with pytest.raises(DataError, match="token -1"), TokenWriter(tmp_path / "a", 10) as writer:
        writer.add_document(np.array([-1]))
    with pytest.raises(DataError, match="float64"), TokenWriter(tmp_path / "a", 10) as writer:
        writer.add_document(np.array([1.0]))
    with pytest.raises(DataError, match="vocabulary of 0"):
        TokenWriter(tmp_path / "a", 0)
    with pytest.raises(DataError, match="vocabulary of 2147483649"):
        TokenWriter(tmp_path / "a", (1 << 31) + 1)
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_do_not_touch_finished_ones(tmp_path):
    prefix = write(tmp_path / "a", DOCUMENTS, 2000)
    with TokenWriter(prefix, 2000) as writer:
        writer.add_document(np.array([1]))
    assert TokenFiles(prefix).num_documents == len(DOCUMENTS)
    write(prefix, [[[8]]], 70000)
    assert (TokenFiles(prefix).dtype, TokenFiles(prefix).document(0).tolist()) == (np.int32, [8])
