import pytest
import torch

from models.dlrm.plan import COLLECTION, build_plan, bytes_per_rank, describe_plan
from tests.trainers import tiny


def _model(rows, dim=16, **more):
    return tiny.config(
        "", model={"table_rows": rows, "multi_hot_sizes": None, "embedding_dim": dim, "bottom_mlp": [dim], **more}
    ).model


@pytest.mark.parametrize("world", [1, 2, 5, 16])
def test_every_column_of_every_table_has_one_owner(world):
    model = _model([50, 60, 70], dim=128)
    plan = describe_plan(model, world)
    assert [(p.table, p.rows, p.dim) for p in plan] == [
        ("table_0", 50, 128),
        ("table_1", 60, 128),
        ("table_2", 70, 128),
    ]
    for table in plan:
        assert table.sharding in ("table_wise", "column_wise")
        assert sorted(table.column_offsets)[0] == 0
        assert len(set(table.column_offsets)) == len(table.ranks)
        assert set(table.ranks) <= set(range(world))
    assert sum(bytes_per_rank(plan, world)) == 180 * 128 * 4


def test_more_ranks_than_tables_leaves_some_without():
    sizes = bytes_per_rank(describe_plan(_model([50, 60]), 5), 5)
    assert sorted(size > 0 for size in sizes) == [False, False, False, True, True]


def test_wide_tables_are_cut_for_many_ranks():
    plan = describe_plan(_model([1000], dim=128), 4)
    assert plan[0].sharding == "column_wise"
    assert plan[0].ranks == (0, 1, 2, 3)
    assert plan[0].column_offsets == (0, 32, 64, 96)


def test_narrow_tables_stay_whole():
    assert {p.sharding for p in describe_plan(_model([50, 60, 70], dim=32), 8)} == {"table_wise"}


def test_memory_is_balanced_for_the_large_preset():
    """Cost alone would put four times the bytes on one of two ranks: the large tables aren't the ones with many ids."""
    rows = [40_000_000] * 5 + [500_000] * 21
    hot = [1] * 5 + [20] * 21
    sizes = bytes_per_rank(describe_plan(_model(rows, dim=128, multi_hot_sizes=hot), 2), 2)
    assert max(sizes) <= 1.55 * min(sizes)


def test_bytes_follow_the_dtype():
    whole, half = (describe_plan(_model([100], embedding_dtype=d), 1)[0].bytes for d in ("fp32", "fp16"))
    assert whole == 2 * half == 100 * 16 * 4


def test_the_plan_is_placed_alike_with_plain_gradients():
    model = _model([50, 60, 70], dim=128)
    fused, plain = (build_plan(model, 4, in_backward=b).plan[COLLECTION] for b in (True, False))
    assert {s.compute_kernel for s in fused.values()} == {"fused"}
    assert {s.compute_kernel for s in plain.values()} == {"dense"}
    assert [(s.sharding_type, s.ranks) for s in fused.values()] == [(s.sharding_type, s.ranks) for s in plain.values()]


def test_no_ranks_is_refused():
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        describe_plan(_model([50]), 0)


def test_ranks_that_share_a_card_are_placed_on_it():
    devices = [torch.device("cuda", index) for index in (0, 0, 1, 1)]
    model = _model([50, 60, 70], dim=128)
    placed, plain = (build_plan(model, 4, devices=d).plan[COLLECTION] for d in (devices, None))
    for table, sharding in placed.items():
        assert sharding.ranks == plain[table].ranks
        for shard in sharding.sharding_spec.shards:
            assert shard.placement.device() == devices[shard.placement.rank()]
