import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.dlrm.index_distribution import check_range
from tests.ranks import run_ranks
from tests.trainers import tiny


def _kjt(values):
    return KeyedJaggedTensor(keys=["cat_0", "cat_1"], values=torch.tensor(values), lengths=torch.tensor([1, 2, 0, 1]))


def test_check_range_names_feature_and_value():
    check_range([_kjt([0, 9, 9, 4])], {"cat_0": 10, "cat_1": 5})
    with pytest.raises(ValueError, match="feature cat_1 has index 5, its table has 5 rows"):
        check_range([_kjt([0, 9, 9, 5])], {"cat_0": 10, "cat_1": 5})
    with pytest.raises(ValueError, match="feature cat_0 has index -1"):
        check_range([_kjt([0, -1, 9, 5])], {"cat_0": 10, "cat_1": 6})


def _distribute_all(policies):
    return [_distribute(policy) for policy in policies]


def _distribute(policy):
    import torch.distributed as dist

    from trainers.families import make_engine

    engine = make_engine(tiny.config("", model={"out_of_range": policy}))
    rank = dist.get_rank()
    batch = tiny.part(tiny.global_batch(tiny.config("").model, 0, 6), 2 * rank, 6 * rank)  # rank 0 has no samples
    if rank == 1:
        batch.sparse.values()[0] = 10**6 + 3  # cat_0 has 50 rows
        batch.sparse.values()[1] = -1
    arrived = engine.indices.finish(engine.indices.send(engine.indices.start(batch.sparse)))
    kjt = arrived.indices[0]
    result = arrived.batch_sizes, arrived.batch_size, {k: kjt[k].values().tolist() for k in kjt.keys()}  # noqa: SIM118
    engine.close()
    return result


def test_indices_reach_the_owners_and_come_into_range():
    expected = {"clamp": [49, 0], "hash": [3, 49]}
    ranks = run_ranks(2, _distribute_all, list(expected))
    for results, first in zip(zip(*ranks, strict=True), expected.values(), strict=True):
        assert [r[0] for r in results] == [[0, 4]] * 2
        assert [r[1] for r in results] == [0, 4]
        held = results[0][2] | results[1][2]
        assert set(held) == {f"cat_{t}" for t in range(5)}
        assert held["cat_0"][:2] == first


def _guarded():
    from models.dlrm.index_distribution import IndexDistribution
    from trainers.families import make_engine

    engine = make_engine(tiny.config(""))
    guarded = IndexDistribution(engine.indices.collection, guard=True)
    batch = tiny.global_batch(tiny.config("").model, 0, 6)
    guarded.start(batch.sparse)
    guarded.check()
    batch.sparse.values()[0] = 50
    arrived = guarded.finish(guarded.send(guarded.start(batch.sparse)))
    assert int(arrived.indices[0]["cat_0"].values()[0]) == 49
    with pytest.raises(ValueError, match="feature cat_0 has index 50, its table has 50 rows"):
        guarded.check()
    guarded.check()  # raised once
    engine.close()


def test_a_guard_clamps_now_and_raises_when_the_step_is_over():
    run_ranks(1, _guarded)
