import numpy as np
import pytest
import torch

from tests.trainers.data.token_files import END, distinct_documents, token_files
from trainers.data.errors import DataError
from trainers.data.text.batch import TextBatch, make_text_batch
from trainers.data.text.batches import TextBatches
from trainers.data.text.packing import IGNORED, PackedDocuments

LENGTH = 8
VOCABULARY = 10**6


@pytest.fixture
def packed(tmp_path):
    files = token_files(tmp_path / "a", distinct_documents(60, 20), True)
    return PackedDocuments(files, np.arange(60), LENGTH, end_of_document=END, ends_stored=True, seed=3, shuffle=True)


def parts(batch: TextBatch) -> tuple[torch.Tensor, ...]:
    return batch.tokens, batch.targets, batch.positions, batch.documents


def equal(a: TextBatch, b: TextBatch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def batches(packed: PackedDocuments, batch_size: int, **options) -> TextBatches:
    return TextBatches(packed, batch_size, vocabulary=VOCABULARY, **options)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("epochs", [None, 2])
def test_global_batches_do_not_depend_on_world(packed, world, epochs):
    options = {"seed": 5, "shuffle": True, "epochs": epochs}
    whole = batches(packed, 6, **options)
    ranks = [batches(packed, 6, rank=rank, world=world, **options) for rank in range(world)]
    steps = whole.end_step or 40
    assert {r.end_step for r in ranks} == {whole.end_step}
    for step in range(steps):
        batch, local = whole.read(step), [r.read(step) for r in ranks]
        sizes = [len(b) for b in local]
        assert sum(sizes) == len(batch)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        for rank, part in enumerate(local):
            assert all(torch.equal(x, y[rank::world]) for x, y in zip(parts(part), parts(batch), strict=True))
            assert [x.dtype for x in parts(part)] == [torch.int64] * 3 + [torch.int32]
            assert {x.shape for x in parts(part)} == {(len(part), LENGTH)}
    if world == 7:
        assert len(ranks[6].read(0)) == 0


def test_training_batches_are_full_and_see_each_target_once_an_epoch(packed):
    train = batches(packed, 7, seed=1, shuffle=True)
    samples = packed.whole_samples
    assert train.samples_per_epoch == samples
    assert samples % 7, "the test wants an epoch that ends within a batch"
    assert packed.left_over, "the test wants a rest that is dropped"
    read = [train.read(step) for step in range(-(-3 * samples // 7))]
    assert {len(batch) for batch in read} == {7}
    targets = torch.cat([batch.targets for batch in read])[: 3 * samples].view(3, -1)
    seen = []
    for row in targets:
        words = row[row != END].tolist()
        assert len(words) == len(set(words))
        assert IGNORED not in words
        seen.append(set(words))
    assert len(set.union(*seen)) > len(seen[0]), "the rest that is dropped should differ between epochs"
    with pytest.raises(TypeError, match="endless"):
        len(train)


@pytest.mark.parametrize("batch_size", [1, 6, 1000])
def test_evaluation_has_every_target_once(tmp_path, batch_size):
    documents = distinct_documents(25, 20, seed=1)
    files = token_files(tmp_path / "a", documents, False)
    data = PackedDocuments(files, np.arange(25), LENGTH, end_of_document=END, ends_stored=False)
    assert data.left_over
    ranks = [list(batches(data, batch_size, rank=rank, world=2, epochs=1)) for rank in range(2)]
    assert (
        len(ranks[0])
        == len(ranks[1])
        == len(batches(data, batch_size, epochs=1))
        == -(-(data.whole_samples + 1) // batch_size)
    )
    targets = torch.cat([batch.targets.flatten() for rank in ranks for batch in rank])
    targets = targets[targets != IGNORED]
    assert len(targets) == data.num_tokens
    assert sum(int(batch.num_targets()) for rank in ranks for batch in rank) == data.num_tokens
    assert sorted(targets[targets != END].tolist()) == sorted(t for d in documents for t in d)


def test_resumes_anywhere(packed):
    options = {"seed": 5, "shuffle": True}
    iterator = iter(batches(packed, 6, **options))
    first = [next(iterator) for _ in range(30)]
    for start in (0, 1, 13, 29):
        resumed = iter(batches(packed, 6, start_step=start, **options))
        assert all(equal(next(resumed), batch) for batch in first[start:])
    ended = batches(packed, 6, start_step=10**6, epochs=1)
    assert (len(ended), list(ended)) == (0, [])
    # The same samples, in the same order, under another batch size: number 30 is 5 * 6 and 15 * 2.
    other = batches(packed, 2, start_step=15, **options)
    assert torch.equal(next(iter(other)).tokens, first[5].tokens[:2])


def test_seeds_differ(packed):
    found = {tuple(batches(packed, 6, seed=seed, shuffle=True).read(0).tokens.flatten().tolist()) for seed in range(4)}
    assert len(found) == 4


def test_a_long_document_does_not_fill_a_batch(tmp_path):
    documents = [[1] * 400, [2] * 400, [3] * 400, [4] * 400]
    files = token_files(tmp_path / "a", documents, True)
    data = PackedDocuments(files, np.arange(4), LENGTH, end_of_document=END, ends_stored=True, shuffle=True)
    batch = batches(data, 16, shuffle=True).read(0)
    assert len(batch.targets[:, 1].unique()) > 2


def test_cumulative_lengths(packed):
    batch = batches(packed, 5, seed=5, shuffle=True).read(2)
    found = batch.cumulative_lengths()
    assert found.dtype == torch.int32
    assert found[0] == 0
    assert found[-1] == 5 * LENGTH
    expected = [
        row * LENGTH + i
        for row in range(5)
        for i in range(LENGTH)
        if i == 0 or batch.documents[row, i] != batch.documents[row, i - 1]
    ]
    assert found.tolist() == [*expected, 5 * LENGTH]
    assert make_text_batch([], LENGTH).cumulative_lengths().tolist() == [0]


def test_moving_a_batch(packed):
    batch = batches(packed, 5).read(0)
    moved = batch.to("meta")
    assert all(part.is_meta and part.shape == (5, LENGTH) for part in parts(moved))
    assert equal(batch.to("cpu"), batch)


def test_tokens_outside_the_models_vocabulary_are_named(packed):
    small = TextBatches(packed, 4, vocabulary=150)
    with pytest.raises(DataError, match=r"a\.bin: token \d+ in sample \d+, allowed are 0 \.\. 149"):
        list(zip(small, range(100), strict=False))


@pytest.mark.parametrize(
    "options",
    [{"rank": 2, "world": 2}, {"rank": -1}, {"start_step": -1}, {"epochs": 0}, {"batch_size": 0}, {"seed": -1}],
)
def test_bad_arguments(packed, options):
    with pytest.raises(DataError, match="allowed are a batch of 1 or more, a rank below world"):
        TextBatches(packed, options.pop("batch_size", 4), vocabulary=VOCABULARY, **options)


def test_too_few_tokens_for_one_sample(tmp_path):
    files = token_files(tmp_path / "a", [[1, 2]], True)
    data = PackedDocuments(files, np.arange(1), LENGTH, end_of_document=END, ends_stored=True)
    with pytest.raises(DataError, match="3 tokens are fewer than one sample of 8"):
        batches(data, 1)
    (only,) = batches(data, 4, epochs=1)
    assert only.tokens.tolist() == [[END, 1, 2, END, END, END, END, END]]
    assert only.targets.tolist() == [[1, 2, END, *[IGNORED] * 5]]
    assert only.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
