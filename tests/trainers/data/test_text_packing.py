"""Packed samples, against a stream that is put together token by token."""

import numpy as np
import pytest

from tests.trainers.data.token_files import END, distinct_documents, token_files
from trainers.data.errors import DataError
from trainers.data.text.packing import IGNORED, PackedDocuments, Sample


def reference(stream_documents: list[list[int]], length: int) -> list[tuple]:
    """(tokens, targets, positions, documents) of every sample, the padded rest included."""
    rows = []  # (input, target, whether a document begins)
    for document in stream_documents:
        if document:
            before = END
            for place, token in enumerate([*document, END]):
                rows.append((before, token, place == 0))
                before = token
    samples = []
    for start in range(0, len(rows), length):
        part = rows[start : start + length]
        part += [(END, IGNORED, place == 0) for place in range(length - len(part))]
        positions, documents = [], []
        for place, (_, _, begins) in enumerate(part):
            new = begins or place == 0
            positions.append(0 if new else positions[-1] + 1)
            documents.append((documents[-1] + begins) if place else 0)
        samples.append(([p[0] for p in part], [p[1] for p in part], positions, documents))
    return samples


def as_lists(sample: Sample) -> tuple:
    return tuple(part.tolist() for part in sample)


def packed(files, documents, length, ends_stored, **options) -> PackedDocuments:
    return PackedDocuments(files, documents, length, end_of_document=END, ends_stored=ends_stored, **options)


def number_of_samples(data: PackedDocuments) -> int:
    return data.whole_samples + (data.left_over > 0)


@pytest.mark.parametrize("ends_stored", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("longest", [1, 5, 40])
def test_samples_are_the_reference(tmp_path, ends_stored, length, longest):
    documents = distinct_documents(30, longest)
    files = token_files(tmp_path / "a", documents, ends_stored)
    chosen = np.array([3, 4, 5, 9, 11, 12, 20, 29])
    data = packed(files, chosen, length, ends_stored)
    expected = reference([documents[i] for i in chosen], length)
    assert number_of_samples(data) == len(expected)
    for number in np.random.default_rng(0).permutation(len(expected)):
        assert as_lists(data.read(0, int(number))) == expected[number]
    sample = data.read(0, 0)
    assert [part.dtype for part in sample] == [np.int64, np.int64, np.int64, np.int32]
    assert all(part.shape == (length,) for part in sample)


@pytest.mark.parametrize("ends_stored", [False, True])
@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_an_epoch_has_every_target_once_in_an_order_of_its_own(tmp_path, ends_stored, seed):
    documents = distinct_documents(40, 12)
    files = token_files(tmp_path / "a", documents, ends_stored)
    orders = []
    for epoch in range(3):
        data = packed(files, np.arange(40), 8, ends_stored, seed=seed, shuffle=True)
        targets = [t for i in range(number_of_samples(data)) for t in data.read(epoch, i).targets.tolist()]
        targets = [t for t in targets if t != IGNORED]
        assert len(targets) == data.num_tokens
        assert sorted(t for t in targets if t != END) == sorted(t for document in documents for t in document)
        assert targets.count(END) == sum(map(bool, documents))
        runs = " ".join(map(str, targets)).split(f" {END}")
        order = [
            next(i for i, d in enumerate(documents) if d and d == list(map(int, run.split()))) for run in runs if run
        ]
        assert sorted(order) == [i for i, d in enumerate(documents) if d]
        orders.append(tuple(order))
        again = packed(files, np.arange(40), 8, ends_stored, seed=seed, shuffle=True)
        assert as_lists(again.read(epoch, 2)) == as_lists(data.read(epoch, 2))
    assert len(set(orders)) == 3


def test_no_input_is_of_another_document_than_its_target(tmp_path):
    documents = distinct_documents(40, 12)
    files = token_files(tmp_path / "a", documents, True)
    owner = {token: i for i, document in enumerate(documents) for token in document}
    data = packed(files, np.arange(40), 16, True, shuffle=True)
    for number in range(data.whole_samples):
        tokens, targets, positions, numbers = (part.tolist() for part in data.read(4, number))
        for place in range(16):
            seen = [t for t, n in zip(tokens[: place + 1], numbers, strict=False) if n == numbers[place]]
            assert len(seen) == positions[place] + 1
            owners = {owner[t] for t in [*seen, targets[place]] if t != END}
            assert len(owners) <= 1
            assert END not in seen[1:]


def test_what_is_refused(tmp_path):
    files = token_files(tmp_path / "a", [[1, 2], [3, END], [4], []], False)
    with pytest.raises(
        DataError, match="document 0 should end in the end-of-document token 99, but its last token is 2"
    ):
        packed(files, np.arange(4), 4, True)
    with pytest.raises(DataError, match="document 1 should not yet end in"):
        packed(files, np.arange(4), 4, False)
    with pytest.raises(DataError, match="no document has a token"):
        packed(files, np.array([3]), 4, False)
    with pytest.raises(DataError, match="no document has a token"):
        packed(files, np.array([], np.int64), 4, False)
    with pytest.raises(DataError, match="length 0"):
        packed(files, np.array([0]), 0, False)
    with pytest.raises(DataError, match="seed -1"):
        packed(files, np.array([0]), 4, False, seed=-1)
