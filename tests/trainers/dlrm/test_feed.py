import pytest

from tests.ranks import RankError, run_ranks
from tests.trainers import tiny
from trainers.dlrm.feed import empty_batch
from trainers.step_timing import StepTimer


def test_an_empty_batch_has_the_shapes_and_types_of_any_other(tmp_path):
    model = tiny.config(tmp_path).model
    empty, batch = empty_batch(model), tiny.global_batch(model, 0, 4)
    assert empty.sparse.keys() == batch.sparse.keys()
    assert empty.sparse.stride() == 0
    assert empty.dense.shape == (0, tiny.NUM_DENSE)
    for name in ("dense", "labels"):
        assert getattr(empty, name).dtype == getattr(batch, name).dtype
    assert empty.sparse.values().dtype == batch.sparse.values().dtype
    assert empty.sparse.lengths().dtype == batch.sparse.lengths().dtype


def _hand_out(config, counts):
    """Batch sizes that this rank saw, until nobody had samples; ranks have different numbers of batches."""
    import torch.distributed as dist

    from trainers.families import make_engine

    engine = make_engine(config)
    number = counts[dist.get_rank()]
    batches = (tiny.part(tiny.global_batch(config.model, i, 4), 0, 2) for i in range(number))
    feed = engine.feed(batches, StepTimer())
    seen = []
    feed.fetch()
    feed.send()
    while True:
        work = feed.take()
        seen.append((len(work.batch), work.indices.batch_sizes))
        if not work.total:
            break
        feed.fetch()
        feed.send()
    engine.close()
    return seen


def test_ranks_stop_together_when_the_last_has_no_samples(tmp_path):
    results = run_ranks(3, _hand_out, tiny.config(tmp_path), [3, 0, 1])
    sizes = [[2, 0, 2], [2, 0, 0], [2, 0, 0], [0, 0, 0]]
    for rank, seen in enumerate(results):
        assert seen == [(step[rank], step) for step in sizes]


def _take_first(config):
    from trainers.families import make_engine

    make_engine(config).feed(iter(()), StepTimer()).take()


def test_taking_what_was_not_fetched_is_an_error(tmp_path):
    with pytest.raises(RankError, match=r"take\(\) before fetch\(\)"):
        run_ranks(1, _take_first, tiny.config(tmp_path))
