import gzip
import random
import re

import numpy as np
import pytest

from tests.trainers.data.clicks import random_lines, write
from trainers.data.errors import DataError
from trainers.data.tsv import BadLine, Block, parse_block, read_blocks

GOOD = random_lines(1, seed=5)[0].split("\t")


def line(**changed: str) -> str:
    """A good line with fields f<number> replaced."""
    fields = list(GOOD)
    for name, text in changed.items():
        fields[int(name[1:])] = text
    return "\t".join(fields)


def parse(text: bytes, first_line: int = 1):
    return parse_block(Block(text, len(text), first_line, 0, 0))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 fields, expected 40"),
        ("\t".join(GOOD[:39]), "39 fields, expected 40"),
        ("\t".join([*GOOD, "00000000"]), "41 fields, expected 40"),
        (line(f0="2"), "label '2', allowed are 0 and 1"),
        (line(f0=""), "label '', allowed"),
        (line(f0="-1"), "label '-1', allowed"),
        (line(f3="1.5"), "integer feature 3 is '1.5'"),
        (line(f3="1e3"), "integer feature 3 is '1e3'"),
        (line(f13="0x10"), "integer feature 13 is '0x10'"),
        (line(f1=" 7"), "integer feature 1 is ' 7'"),
        (line(f1="NA"), "integer feature 1 is 'NA'"),
        (line(f2="9" * 19), "up to 18 digits"),
        (line(f14="0000000g"), "category 1 is '0000000g', allowed are hexadecimal digits"),
        (line(f39="-1"), "category 26 is '-1'"),
        (line(f39="\udce9".encode("utf-8", "surrogateescape").decode("latin-1")), "category 26 is "),
        (line(f20="123456789"), "up to 8 hexadecimal digits (32 bits)"),
        (line(f20='"0000001"'), "category 7 is"),
        (line() + "\r\r", "category 26 is"),
        (line(f5="1\r2"), "integer feature 5 is"),
    ],
)
def test_malformed_line_is_named(text, reason):
    rows, bad = parse("\n".join([line(), text, line(), line()]).encode("latin-1") + b"\n", first_line=7)
    assert [b.line for b in bad] == [8]
    assert reason in bad[0].reason
    assert len(rows.labels) == 3


def naive_is_valid(text: bytes) -> bool:
    fields = text.split(b"\t")
    return (
        len(fields) == 40
        and fields[0] in (b"0", b"1")
        and all(re.fullmatch(rb"-?[0-9]+", f) and len(f.lstrip(b"-0")) <= 18 for f in fields[1:14] if f)
        and all(set(f) <= set(b"0123456789abcdefABCDEF") and len(f) <= 8 for f in fields[14:])
    )


def test_fast_and_slow_path_accept_the_same_lines():
    rng = random.Random(1)
    base = [text.encode() for text in random_lines(50, seed=2)]
    rejected = 0
    for _ in range(600):
        text = bytearray(rng.choice(base))
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(text))
            replacement = [rng.choice(b'0123456789abcdefABCDEF-\t\n x+."g')] * rng.choice([0, 1, 2])
            text[at : at + rng.randrange(2)] = bytes(replacement)
        data = bytes(text) + b"\n" + base[0]
        valid = [naive_is_valid(part) for part in data.split(b"\n")]
        rows, bad = parse(data)
        assert [b.line for b in bad] == [number for number, good in enumerate(valid, 1) if not good], data
        assert len(rows.labels) == sum(valid)
        rejected += len(bad)
    assert 100 < rejected < 1000


def test_values_and_missing_fields():
    rows, bad = parse(f"{line(f0='1', f1='-7', f2='', f14='', f15='A', f39='FFFFffff')}\n".encode())
    assert not bad
    assert rows.labels.tolist() == [1]
    assert rows.dense[0, :2].tolist() == [0.0, np.float32(np.log(3))]  # clipped at -2; missing is 0
    assert (rows.values[1, 0], rows.values[25, 0]) == (10, 0xFFFFFFFF)
    assert rows.missing[0] & 1 == 1
    assert rows.missing[0] >> 1 & 1 == rows.missing[0] >> 25 & 1 == 0


def test_zero_is_not_missing():
    rows, _ = parse(f"{line(f14='00000000', f15='')}\n".encode())
    assert rows.values[:2, 0].tolist() == [0, 0]
    assert rows.missing[0] & 3 == 2


def all_bad_lines(path, block_bytes) -> tuple[int, list[BadLine]]:
    parsed = [parse_block(block) for block in read_blocks(path, block_bytes)]
    return sum(len(rows.labels) for rows, _ in parsed), [b for _, bad in parsed for b in bad]


@pytest.mark.parametrize("block_bytes", [1000, 4096, 1 << 20])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_numbers_do_not_depend_on_blocks_or_compression(tmp_path, block_bytes, ending):
    lines = random_lines(200, seed=3, digits=1)
    wrong = [1, 2, 77, 150, 200]
    for number in wrong:
        lines[number - 1] = "broken"
    text = ending.join(lines).encode()  # no line end after the last line
    plain, packed = tmp_path / "a.tsv", tmp_path / "a.tsv.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text[:999]) + gzip.compress(text[999:]))  # two members, as pigz and cat make
    expected = (195, [BadLine(n, "1 fields, expected 40 (label, 13 integers, 26 categories)") for n in wrong])
    assert all_bad_lines(plain, block_bytes) == expected
    assert all_bad_lines(packed, block_bytes) == expected


@pytest.mark.parametrize("packed", [False, True])
def test_reading_goes_on_from_any_block(tmp_path, packed):
    path = write(tmp_path / "a", random_lines(300))
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    blocks = list(read_blocks(path, 5000))
    assert len(blocks) > 5
    for number, before in enumerate(blocks[:-1], 1):
        again = list(read_blocks(path, 5000, before.offset, before.next_line))
        assert again[0].first_line == blocks[number].first_line
        assert b"".join(b.data for b in again) == b"".join(b.data for b in blocks[number:])


def test_truncated_gzip_says_where(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(random_lines(2000)).encode())[:-2000])
    with pytest.raises(DataError, match=r"a\.tsv\.gz: broken gzip stream after line \d+"):
        list(read_blocks(path, 1 << 12))


def test_file_without_lines_is_refused(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(b"\0" * 300_000)
    with pytest.raises(DataError, match="image:1: no line end within"):
        list(read_blocks(path, 1 << 16))
