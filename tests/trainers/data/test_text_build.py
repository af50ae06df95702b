import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.trainers.data.token_files import END, distinct_documents, token_files
from trainers.data.errors import DataError
from trainers.data.text.build import (
    build_text_batches,
    is_megatron_prefix,
    open_megatron,
    open_text,
    standard_library_directory,
)
from trainers.data.text.packing import IGNORED
from trainers.data.text.prepare import TextOptions, prepare_text


@pytest.fixture
def directory(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (1 + i % 5)}) + "\n" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    prepare_text([tmp_path / "a.jsonl"], tmp_path / "out", TextOptions(shares=["0.8", "0.1", "0.1"]))
    return tmp_path / "out"


def target_counts(data, split: str, length: int = 16) -> int:
    return sum(int(batch.num_targets()) for batch in build_text_batches(data, split, 5, length))


def test_evaluation_splits_are_whole_and_apart_from_training(directory):
    data = open_text(directory)
    assert (data.vocabulary, data.end_of_document, data.name) == (257, 256, "out")
    tokens = data.split_tokens()
    assert sum(tokens.values()) == data.files.num_tokens
    assert {split: target_counts(data, split) for split in ("val", "test")} == {s: tokens[s] for s in ("val", "test")}
    assert {split: len(documents) for split, documents in data.documents.items()} == {"train": 32, "val": 4, "test": 4}
    wanted = {bytes(data.files.document(i)[:-1].astype(np.uint8)).decode() for i in data.documents["val"]}
    text = torch.cat([batch.targets.flatten() for batch in build_text_batches(data, "val", 3, 16)]).tolist()
    documents = "".join(chr(t) if t < 256 else "\0" for t in text if t != IGNORED).split("\0")
    assert set(documents) == wanted | {""}


def test_training_is_endless_shuffled_and_resumes(directory):
    data = open_text(directory)
    steps = [build_text_batches(data, "train", 4, 16, seed=seed).read(9).tokens.tolist() for seed in (0, 0, 1)]
    assert steps[0] == steps[1] != steps[2]
    in_order = build_text_batches(data, "train", 4, 16, shuffle=False).read(0)
    first = data.files.document(data.documents["train"][0])[:15].tolist()
    assert in_order.tokens[0].tolist()[: len(first) + 1] == [256, *first][:16]
    batches = build_text_batches(data, "train", 4, 16, start_step=500)
    assert torch.equal(next(iter(batches)).tokens, batches.read(500).tokens)


def test_megatrons_own_files(tmp_path):
    documents = distinct_documents(50, 20)
    for ends_stored in (False, True):
        prefix = tmp_path / f"{ends_stored}_text_document"
        token_files(prefix, documents, ends_stored)
        assert is_megatron_prefix(prefix)
        data = open_megatron(prefix, END, ends_stored=ends_stored, shares=["0.5", "0.5", "0"])
        assert (data.vocabulary, data.split_tokens()["test"]) == (None, 0)
        assert sum(data.split_tokens().values()) == sum(len(d) + 1 for d in documents if d)
        batches = build_text_batches(data, "val", 8, 16, vocabulary=10**6)
        assert sum(int(b.num_targets()) for b in batches) == data.split_tokens()["val"]
        with pytest.raises(DataError, match="the vocabulary has to be given"):
            build_text_batches(data, "val", 8, 16)
        with pytest.raises(DataError, match=r"the model has 99 tokens, the text of .* needs 100 or more"):
            build_text_batches(data, "val", 8, 16, vocabulary=99)
        with pytest.raises(DataError, match="split test has no documents"):
            build_text_batches(data, "test", 8, 16, vocabulary=10**6)
        with pytest.raises(DataError, match="end-of-document token 99, but"):
            build_text_batches(
                open_megatron(prefix, END, ends_stored=not ends_stored), "train", 8, 16, vocabulary=10**6
            )
    with pytest.raises(DataError, match="end_of_document -1"):
        open_megatron(prefix, -1, ends_stored=True)


def test_what_is_not_prepared_text(directory, tmp_path):
    assert not is_megatron_prefix(directory)
    with pytest.raises(DataError, match=r"no such directory; `python -m launch\.prepare_text"):
        open_text(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no prepared text: expected meta\.json"):
        open_text(tmp_path / "empty")
    (tmp_path / "empty" / "tokens.bin.part").touch()
    with pytest.raises(DataError, match="its preparation was not finished"):
        open_text(tmp_path / "empty")
    with pytest.raises(DataError, match="split 'dev', allowed are train, val, test"):
        build_text_batches(open_text(directory), "dev", 4, 16)
    with pytest.raises(DataError, match="the model has 256 tokens"):
        build_text_batches(open_text(directory), "train", 4, 16, vocabulary=256)
    index = directory / "tokens.idx"
    raw = index.read_bytes()
    documents = struct.unpack_from("<Q", raw, 26)[0]
    index.write_bytes(raw[:26] + struct.pack("<Q", documents - 1) + raw[34:-16] + raw[-8:])
    with pytest.raises(DataError, match=r"39 documents of \d+ tokens, meta\.json says 40"):
        open_text(directory)
    (directory / "tokens.bin").write_bytes((directory / "tokens.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"tokens\.bin: cut short"):
        open_text(directory)


def prepare_and_read(cache: str) -> tuple[str, list, dict]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    directory = standard_library_directory("byte", cache=Path(cache))
    data = open_text(directory)
    batches = build_text_batches(data, "train", 4, 64, rank=rank, world=world, seed=2)
    local = batches.read(3).tokens
    gathered = [torch.empty_like(local) for _ in range(world)]
    torch.distributed.all_gather(gathered, local)
    val = build_text_batches(data, "val", 64, 512, rank=rank, world=world)
    count = sum(batch.num_targets() for batch in val)
    torch.distributed.all_reduce(count)
    return (
        str(directory),
        [g.tolist() for g in gathered],
        {"targets": int(count), "steps": len(val)} | data.split_tokens(),
    )


def test_ranks_that_start_together_share_the_default_corpus(tmp_path):
    found = run_ranks(2, prepare_and_read, str(tmp_path))
    assert found[0] == found[1]
    directory, gathered, counts = found[0]
    assert counts["targets"] == counts["val"] > 100_000
    assert counts["train"] > 10 * counts["val"] > 0
    whole = build_text_batches(open_text(directory), "train", 4, 64, seed=2).read(3).tokens
    assert [whole[0::2].tolist(), whole[1::2].tolist()] == gathered
    start = time.monotonic()
    assert str(standard_library_directory("byte", cache=tmp_path)) == directory
    assert time.monotonic() - start < 1
    with pytest.raises(DataError, match="allowed for the standard library's sources are byte and bpe"):
        standard_library_directory("word", cache=tmp_path)
