"""Training on a GPU: the losses of plain torch on the CPU, under either comm. Two ranks share the card where there is one."""

import pytest
import torch

from tests.models.dlrm.plain import train_plain
from tests.ranks import run_ranks
from tests.trainers import tiny
from trainers import checkpoint, device
from trainers.checkpoint import Progress

pytestmark = pytest.mark.gpu

COMMS = ("baseline", "fused")
BACKEND = device.BACKENDS["cuda"]


def _config(path, comm, **groups):
    trainer = {"device": "cuda", "ranks_per_gpu": 2 if torch.cuda.device_count() < 2 else 1}
    return tiny.config(path, comm, **{**groups, "trainer": {**trainer, **groups.get("trainer", {})}})


def _train_all(configs):
    import fused_ops

    results = []
    for config in configs:
        device.take(config.trainer)
        fused_ops.reset_counters()
        records = tiny.train(config)
        results.append((tiny.losses(records), records, fused_ops.counters()))
    return results


def test_losses_are_those_of_plain_torch(tmp_path):
    variants = [
        {},
        {"optim": {"name": "adagrad", "lr": 0.1}},
        {"optim": {"name": "adam", "lr": 0.01, "in_backward": False}},
        {"data": {"batch_size": 25, "num_samples": 476}, "trainer": {"steps": 30}},
    ]
    configs = [_config(tmp_path, comm, **variant) for variant in variants for comm in COMMS]
    results = run_ranks(2, _train_all, configs, backend=BACKEND, timeout=280)[0]
    for config, (losses, records, counters) in zip(configs, results, strict=True):
        assert losses == pytest.approx(train_plain(config), rel=1e-4), config.optim
        assert records[-1]["event"] == "eval"
        assert records[-1]["samples"] == config.data.num_samples
        ran = {backend for operator, backend, _ in counters if operator == "embedding_all_to_all"}
        assert ran == ({"cuda"} if config.comm.mode == "fused" else set())


def test_both_comms_agree_where_plain_torch_has_no_counterpart(tmp_path):
    variants = [
        {"optim": {"name": "rowwise_adagrad", "lr": 0.1}},
        {"optim": {"name": "adam", "lr": 0.01}},
        {"model": {"embedding_dtype": "fp16"}},
        {"trainer": {"dense_dtype": "bf16"}},
        {"trainer": {"compile": True}},
    ]
    configs = [_config(tmp_path, comm, **variant) for variant in variants for comm in COMMS]
    results = run_ranks(2, _train_all, configs, backend=BACKEND, timeout=280)[0]
    for variant, baseline, fused in zip(variants, results[::2], results[1::2], strict=True):
        assert fused[0] == pytest.approx(baseline[0], rel=1e-2 if "dense_dtype" in str(variant) else 1e-3), variant
        assert baseline[0][0] != baseline[0][-1]


def test_the_parts_of_a_step_add_up(tmp_path):
    results = run_ranks(2, _train_all, [_config(tmp_path, comm) for comm in COMMS], backend=BACKEND, timeout=120)
    for _, records, _ in results[0]:
        for record in records[5:-1]:
            parts = [record[f"{part}_ms"] for part in ("data", "index_dist", "exposed_comm", "compute")]
            assert sum(parts) == pytest.approx(record["step_ms"], rel=1e-3)
            assert all(part >= 0 for part in parts)


def _go_on(whole, stopping, going_on):
    from trainers.families import make_engine

    device.take(whole.trainer)
    straight = tiny.losses(tiny.train(whole))
    before = tiny.losses(tiny.train(stopping))
    engine = make_engine(going_on)
    progress, _ = checkpoint.load(going_on, engine, checkpoint.find(going_on.trainer.resume, going_on.run_dir))
    after = tiny.losses(tiny.run_loop(going_on, engine, progress))
    engine.close()
    return straight, before + after


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("optim", [{"name": "rowwise_adagrad", "lr": 0.1}, {"name": "adam", "lr": 0.01}])
def test_a_checkpoint_goes_on(optim, comm, tmp_path):
    whole = _config(tmp_path / "whole", comm, optim=optim, trainer={"steps": 12})
    stopping = _config(tmp_path / "run", comm, optim=optim, trainer={"steps": 6, "checkpoint_every": 6})
    going_on = _config(tmp_path / "run", comm, optim=optim, trainer={"steps": 12, "resume": "auto"})
    for straight, resumed in run_ranks(2, _go_on, whole, stopping, going_on, backend=BACKEND, timeout=180):
        assert resumed == pytest.approx(straight, rel=1e-5)


def _bad_index(config):
    from trainers.families import make_engine

    device.take(config.trainer)

    def batches(*args):
        for number, batch in enumerate(tiny.build_batches(*args)):
            if number == 2:
                batch.sparse.values()[0] = 50
            yield batch

    engine, progress = make_engine(config), Progress()
    with pytest.raises(ValueError, match=r"feature cat_0 has index 50|outside its table"):
        tiny.run_loop(config, engine, progress, batches)
    engine.close()
    torch.zeros(1, device=device.current(config.trainer)).item()  # the context still works
    return progress.step


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("in_backward", [True, False])
def test_an_index_out_of_range_is_raised_in_its_step(in_backward, comm, tmp_path):
    config = _config(tmp_path, comm, optim={"in_backward": in_backward}, trainer={"ranks_per_gpu": 1})
    assert run_ranks(1, _bad_index, config, backend=BACKEND) == [2]
