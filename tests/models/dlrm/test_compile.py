"""`trainer.compile`: the dense part in whole graphs, a fused operator inside, and the same training."""

import pytest

from tests.ranks import run_ranks
from tests.trainers import tiny

STEPS = 5
VARIANTS = [
    {"optim": {"name": "rowwise_adagrad", "lr": 0.1, "warmup_steps": 4}},  # another learning rate in each step
    {"optim": {"in_backward": False}, "model": {"interaction": "dcnv2", "dcn_low_rank": 4}},
    {"data": {"batch_size": 25}, "trainer": {"dense_dtype": "bf16"}},  # ranks have 12 and 13 samples
]


def _train(configs):
    import torch._dynamo

    import fused_ops

    results = []
    for config in configs:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fused_ops.reset_counters()
        losses = tiny.losses(tiny.train(config))
        counted = torch._dynamo.utils.counters
        operators = {name: calls for (name, *_), calls in fused_ops.counters().items()}
        results.append((losses, operators, dict(counted["graph_break"]), counted["stats"]["unique_graphs"]))
    return results


def _configs(path, comm, backend, variants):
    configs = []
    for variant in variants:
        for compiled in (False, True):
            trainer = {"steps": STEPS, "compile": compiled, "compile_backend": backend, **variant.get("trainer", {})}
            configs.append(tiny.config(path, comm, **{**variant, "trainer": trainer}))
    return configs


def _check(results, comm, tolerance):
    for (eager, eager_calls, _, no_graphs), (compiled, calls, breaks, graphs) in zip(
        results[::2], results[1::2], strict=True
    ):
        assert compiled == pytest.approx(eager, rel=tolerance)
        assert len(compiled) == STEPS
        assert calls == eager_calls, "a call was merged, dropped or added"
        assert (comm == "baseline") == (calls == {})
        assert breaks == {}
        assert graphs > no_graphs == 0


@pytest.mark.parametrize(("comm", "variants"), [("fused", VARIANTS), ("baseline", VARIANTS[-1:])])
def test_compiled_training_is_training(comm, variants, tmp_path):
    results = run_ranks(2, _train, _configs(tmp_path, comm, "aot_eager", variants), timeout=180)
    for rank in results:
        _check(rank, comm, 1e-5)


@pytest.mark.slow
def test_inductors_kernels_train_alike(tmp_path):
    results = run_ranks(
        2,
        _train,
        _configs(tmp_path, "fused", "inductor", VARIANTS[:1]),
        timeout=280,
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    _check(results[0], "fused", 1e-4)
