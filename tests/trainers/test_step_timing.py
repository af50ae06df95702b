import statistics
import time

import pytest
import torch

import fused_ops
from tests.ranks import run_ranks
from tests.trainers import tiny
from trainers.checkpoint import Progress
from trainers.step_timing import StepTimer


def test_parts_add_up_and_a_pause_leaves_no_trace(monkeypatch):
    waits = iter([0.0, 5.0, 7.0])
    monkeypatch.setattr(fused_ops, "exposed_wait_ms", lambda: next(waits))
    timer = StepTimer()
    with timer.part("data"):
        time.sleep(0.02)
    with timer.part("index_dist"):
        time.sleep(0.01)
    with timer.pause(), timer.part("exposed"):
        time.sleep(0.05)  # and the fused operators waited 5 ms in here
    time.sleep(0.01)
    times = timer.end_step()
    assert times.data_ms == pytest.approx(20, abs=5)
    assert times.index_dist_ms == pytest.approx(10, abs=5)
    assert times.exposed_comm_ms == pytest.approx(7)
    assert times.step_ms == pytest.approx(40, abs=10)
    total = times.data_ms + times.index_dist_ms + times.exposed_comm_ms + times.compute_ms
    assert total == pytest.approx(times.step_ms)


LATE_S = 0.15
PLACES = ("lookup", "top of backward", "end of backward")


def _late_everywhere(config):
    return {where: _late_ranks(config, where) for where in PLACES}


def _late_ranks(config, where):
    """Rank 1 is LATE_S late in every step, at one place; what rank 0's clock says of the last steps."""
    import torch.distributed as dist

    from trainers.families import make_engine

    engine = make_engine(config)
    late = dist.get_rank() == 1
    forward, model = engine.forward, engine.model

    def late_forward(dense, indices):
        if late and where == "lookup":
            time.sleep(LATE_S)
        logits = forward(dense, indices)
        if late and where == "top of backward" and logits.requires_grad:
            logits.register_hook(lambda grad: time.sleep(LATE_S))
        return logits

    def late_batches(data, model_config, split, rank, world, start):
        for batch in tiny.build_batches(data, model_config, split, rank, world, start):
            if where == "loader":
                time.sleep(LATE_S)
            yield batch

    if late and where == "end of backward":
        first = next(p for n, p in model.named_parameters() if n.endswith("dense_arch.model._mlp.0._linear.weight"))
        first.register_hook(lambda grad: time.sleep(LATE_S))
    engine.forward = late_forward
    records = tiny.run_loop(config, engine, Progress(), late_batches)
    return [r for r in records if r["event"] == "train"][3:-1]


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_waiting_for_a_late_peer_is_exposed_communication(comm, tmp_path):
    """A peer late before the pooled exchange, before that of the gradients, and before the dense all-reduce."""
    records = run_ranks(2, _late_everywhere, tiny.config(tmp_path, comm, trainer={"steps": 8}))[0]
    for where in PLACES:
        exposed = statistics.median(record["exposed_comm_ms"] for record in records[where])
        compute = statistics.median(record["compute_ms"] for record in records[where])
        assert exposed > 0.5 * LATE_S * 1e3, where
        assert compute < 0.5 * LATE_S * 1e3, where


def test_a_slow_loader_is_data(tmp_path):
    for record in run_ranks(2, _late_ranks, tiny.config(tmp_path, trainer={"steps": 8}), "loader")[0]:
        assert record["data_ms"] > 0.99 * LATE_S * 1e3
        assert record["compute_ms"] < 0.5 * LATE_S * 1e3


def _alone(config):
    records = [r for r in tiny.train(config) if r["event"] == "train"]
    return [(r["exposed_comm_ms"], r["step_ms"]) for r in records[3:]]


def test_one_rank_exposes_next_to_nothing(tmp_path):
    times = run_ranks(1, _alone, tiny.config(tmp_path))[0]
    exposed, steps = (torch.tensor(t).median() for t in zip(*times, strict=True))
    assert exposed < 0.3 * steps


def _train_with_renamed_nodes(config):
    from trainers import step_timing

    step_timing.EXCHANGE_NODES = ("RenamedWaitBackward", "RenamedReqBackward")
    with pytest.raises(RuntimeError, match="RenamedWaitBackward and RenamedReqBackward"):
        tiny.train(config)


def test_an_exchange_that_cannot_be_timed_is_an_error(tmp_path):
    run_ranks(2, _train_with_renamed_nodes, tiny.config(tmp_path, trainer={"steps": 1}))
