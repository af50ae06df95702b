"""The limits' arithmetic, by hand."""

import pytest

from launch.bench import limits
from launch.bench.cuda_timing import plan
from launch.bench.limits import Rates, Traffic
from launch.bench.nccl_groups import fitting
from launch.bench.shapes import AllToAllShape, EmbeddingShape

SHAPE = EmbeddingShape(tables_per_rank=2, rows=100, dim=8, pooling=3, batch=10, dtype="bf16")
RATES = Rates(read=2e9, copy=4e9, gather=1e9)


def test_every_rank_moves_each_byte_once():
    traffic = SHAPE.traffic(world=4)
    assert traffic.gathered == 4 * (10 * 2 * 3) * 8 * 2
    assert traffic.read == 4 * (10 * 2 * 3 + 10 * 2 + 1) * 8
    assert traffic.written == 4 * 10 * 2 * 8 * 2
    assert traffic.sent == traffic.written * 3 / 4
    assert traffic.share(2).written == traffic.written / 2
    assert AllToAllShape(kib=1).traffic(world=2) == Traffic(copied=2048, sent=1024)


def test_ranks_that_share_memory_pay_for_all_bytes():
    limit = limits.of_shared_memory(Traffic(gathered=10**6, read=2 * 10**6, written=4 * 10**6, sent=10**9), RATES)
    assert limit.ms == pytest.approx(1 + 1 + 1)
    assert limit.formula == "all ranks: 1 MB gathered at 1 GB/s + 2 MB read at 2 GB/s + 4 MB written at 4 GB/s"
    assert limits.of_shared_memory(Traffic(copied=10**6), RATES).ms == pytest.approx(0.5)


def test_a_link_of_its_own_hides_the_shorter_part():
    traffic = Traffic(sent=50 * 10**6)
    assert limits.of_host_link(traffic, one_way=50e9, lookups_ms=0.4).ms == pytest.approx(1.0)
    slower = limits.of_host_link(traffic, one_way=50e9, lookups_ms=1.5)
    assert slower.ms == 1.5
    assert slower.formula == "max of lookups 1.5 ms and 50 MB sent at 50 GB/s each way: 1 ms"
    assert limits.of_host_link(traffic, one_way=50e9, lookups_ms=None).ms == pytest.approx(1.0)
    assert limits.of_own_link(2.0, 3.0).ms == 3.0
    assert limits.of_own_link(None, 3.0).ms == 3.0


def test_a_cpu_rank_writes_each_line_twice():
    limit = limits.of_host_memory(Traffic(gathered=10**6, read=10**6, written=10**6), read=1e9, copy=1e9)
    assert limit.ms == pytest.approx(4.0)


def test_gather_rate_takes_ids_and_results_off():
    traffic = Traffic(gathered=8 * 10**6, read=2 * 10**6, written=4 * 10**6)
    assert limits.gather_rate(traffic, ms=4.0, read=2e9, copy=4e9) == pytest.approx(4e9)
    # Where the rest alone would take longer than the whole took, its rates are too low: all bytes over the time.
    assert limits.gather_rate(traffic, ms=1.0, read=2e9, copy=4e9) == pytest.approx(14e9)


@pytest.mark.parametrize(
    ("replay_ms", "planned"), [(0.1, (3, 9)), (10.0, (3, 6)), (30.0, (2, 3)), (100.0, (1, 3)), (0.0, (3, 9))]
)
def test_long_variants_get_fewer_replays_then_fewer_rounds(replay_ms, planned):
    assert plan(replay_ms, share_ms=200.0, repeats=3, rounds=9) == planned


def test_rounds_below_the_least_are_kept():
    assert plan(100.0, share_ms=1.0, repeats=3, rounds=2) == (1, 2)
    assert plan(0.1, share_ms=100.0, repeats=0, rounds=1) == (1, 1)


def test_communicators_of_all_ranks_fit_the_card():
    assert fitting([], num_sms=132, ranks_per_gpu=4) == [4, 8, 16, 32]
    assert fitting([], num_sms=132, ranks_per_gpu=8) == [4, 8, 16]
    assert fitting([64, 80], num_sms=132, ranks_per_gpu=2) == [64]
