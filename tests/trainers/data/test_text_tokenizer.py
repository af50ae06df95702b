import json
import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from trainers.data.errors import DataError
from trainers.data.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

ODD = [
    "",
    "a",
    "tab\tcr\r\nnul\0del\x7f",
    "héllo wörld",
    "漢字かな🎉",
    "<|endoftext|> in the text",
    " " * 50,
    "x" * 3000,
]


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgé漢 ", k=rng.randrange(1, 8))) for _ in range(200)]
    return [" ".join(rng.choices(words, k=rng.randrange(200))) for _ in range(count)]


def corpus() -> list[str]:
    return random_texts(0, 40)


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (257, 256)
    for text, ids in zip(ODD, tokenizer.encode(ODD), strict=True):
        assert ids.tolist() == list(text.encode())
        assert ids.dtype == np.int64
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([104, 256, 105]) == "h<|endoftext|>i"


def test_the_library_reads_the_byte_tokenizer_alike(tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    every_byte = "".join(map(chr, range(256))) + "".join(map(chr, range(0x700, 0x900))) + "\U0010ffff\U00010000"
    for text in [*ODD, every_byte]:
        assert library.encode(text).ids == list(text.encode())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(loaded, ByteTokenizer)


def test_bpe_is_exact_and_shorter(tmp_path):
    tokenizer = train_bpe(iter(corpus()), 400)
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (400, 0)
    texts = [*ODD, *random_texts(1, 10)]
    encoded = tokenizer.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_document not in ids
        assert len(ids) <= len(text.encode())
    assert sum(map(len, encoded[-10:])) < 0.7 * sum(len(text.encode()) for text in texts[-10:])
    tokenizer.save(tmp_path / "tokenizer.json")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(again) is Tokenizer
    assert (again.vocabulary, again.end_of_document, again.to_json()) == (400, 0, tokenizer.to_json())
    assert [ids.tolist() for ids in again.encode(texts)] == [ids.tolist() for ids in encoded]


def test_bpe_is_smaller_where_the_text_has_no_more():
    assert train_bpe(iter(["ab ab ab"]), 1000).vocabulary < 270
    assert train_bpe(iter([]), 257).vocabulary == 257


TRAIN = """
from tests.trainers.data.test_text_tokenizer import corpus, train_bpe
print(train_bpe(iter(corpus()), 600).to_json())
"""


def test_another_process_trains_the_same_bpe():
    found = [subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, check=True).stdout for _ in range(2)]
    assert found[0] == found[1]
    assert json.loads(found[0]) == json.loads(train_bpe(iter(corpus()), 600).to_json())


def test_anothers_tokenizer(tmp_path):
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    other.add_special_tokens(["</s>"])
    other.enable_truncation(2)
    other.save(str(tmp_path / "other.json"))
    loaded = load_tokenizer(tmp_path / "other.json", "</s>")
    assert (loaded.vocabulary, loaded.end_of_document) == (4, 3)
    assert loaded.encode(["a b c b"])[0].tolist() == [0, 1, 2, 1]
    with pytest.raises(DataError, match=r"other\.json: the tokenizer has no token '<\|endoftext\|>'"):
        load_tokenizer(tmp_path / "other.json")


def test_what_is_refused(tmp_path):
    with pytest.raises(DataError, match="byte-level BPE needs 257 or more"):
        train_bpe(iter(["a"]), 256)
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"broken\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(DataError, match="UTF-8 cannot hold"):
        ByteTokenizer().encode(["\ud800"])
