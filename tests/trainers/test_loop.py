import math

import pytest
import torch

from tests.models.dlrm.plain import train_plain
from tests.ranks import RankError, run_ranks
from tests.trainers import tiny
from trainers.checkpoint import Progress

COMMS = ("baseline", "fused")


def _relative(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_of_plain_torch(world, tmp_path):
    """20 steps on equal global batches, under either comm, with every kind of update that plain torch has."""
    variants = [
        {},
        {"optim": {"name": "adagrad", "lr": 0.1}},
        {"optim": {"in_backward": False}},
        {"optim": {"name": "adagrad", "lr": 0.1, "in_backward": False}},
        {"optim": {"name": "adam", "lr": 0.01, "in_backward": False}},
        {"model": {"pooling": "mean", "interaction": "dcnv2", "dcn_low_rank": 4}},
        # 25 samples over the ranks, 1 in the last step: some ranks have none, and nobody has a 21st batch
        {"data": {"batch_size": 25, "num_samples": 476}, "trainer": {"steps": 30}},
    ]
    if world > 2:
        variants = [variants[0], variants[3], variants[-1]]
    configs = [tiny.config(tmp_path, comm, **v) for v in variants for comm in COMMS]
    results = run_ranks(world, tiny.train_all, configs, timeout=180)
    for i, config in enumerate(configs):
        trained, expected = tiny.losses(results[0][i]), train_plain(config)
        assert len(trained) == 20
        assert _relative(trained, expected) < 1e-5, (config.comm.mode, config.optim, config.model.interaction)
        assert all(tiny.losses(rank[i]) == trained for rank in results), "ranks disagree on the loss"
        evaluation = results[0][i][-1]
        assert evaluation["event"] == "eval"
        assert evaluation["samples"] == config.data.num_samples


def test_both_comms_agree_where_plain_torch_has_no_counterpart(tmp_path):
    """Column slices, row-wise Adagrad, clipping and accumulation, fp16 tables, a rank without tables."""
    wide = {"embedding_dim": 64, "table_rows": [50, 60], "multi_hot_sizes": [1, 9], "bottom_mlp": [64]}
    variants = [
        ({"model": wide, "optim": {"name": "rowwise_adagrad", "lr": 0.1}}, 1e-5),
        ({"optim": {"name": "rowwise_adagrad", "lr": 0.1, "in_backward": False}}, 1e-5),
        ({"optim": {"in_backward": False, "clip_norm": 0.05, "accumulate": 3}}, 1e-5),
        ({"model": {"embedding_dtype": "fp16"}}, 1e-4),
        ({"trainer": {"dense_dtype": "bf16"}}, 1e-3),
        ({"model": {"table_rows": [50], "multi_hot_sizes": [2]}, "optim": {"warmup_steps": 10}}, 1e-5),
    ]
    configs = [tiny.config(tmp_path, comm, **v) for v, _ in variants for comm in COMMS]
    results = run_ranks(3, tiny.train_all, configs, timeout=180)[0]
    for i, (variant, tolerance) in enumerate(variants):
        baseline, fused = (tiny.losses(results[2 * i + j]) for j in range(2))
        assert _relative(fused, baseline) < tolerance, variant
        assert baseline[0] != baseline[-1]


def test_clipping_and_accumulation_do_what_they_say(tmp_path):
    """Three accumulated batches are one batch of three times the size; a tiny clip norm stops learning."""
    plain = {"in_backward": False, "lr": 0.1}
    configs = [
        tiny.config(tmp_path, data={"batch_size": 24}, optim=plain, trainer={"steps": 6}),
        tiny.config(tmp_path, data={"batch_size": 8}, optim={**plain, "accumulate": 3}, trainer={"steps": 6}),
        tiny.config(tmp_path, data={"batch_size": 24}, optim={**plain, "clip_norm": 1e-7}, trainer={"steps": 6}),
    ]
    whole, parts, clipped = (tiny.losses(r) for r in run_ranks(2, _train_on_slices, configs)[0])
    assert _relative(parts, whole) < 1e-5
    assert abs(clipped[-1] - whole[-1]) > 1e-3


def _train_on_slices(configs):
    """Batches of any size cut from one stream of samples."""

    def stream(data, model, split, rank, world, start):
        for number in range(start, 1 << 20):
            first = number * data.batch_size
            whole = tiny.part(
                tiny.global_batch(model, first // 24, 24, split), first % 24, first % 24 + data.batch_size
            )
            half = data.batch_size // world
            yield tiny.part(whole, rank * half, (rank + 1) * half)
            if split != "train" and number == 3:
                return

    from trainers.families import make_engine

    return [tiny.run_loop(config, make_engine(config), Progress(), stream) for config in configs]


def test_in_backward_updates_refuse_clipping_and_accumulation(tmp_path):
    for optim in ({"clip_norm": 1.0}, {"accumulate": 2}):
        with pytest.raises(RankError, match=r"set optim.in_backward=false"):
            run_ranks(1, tiny.train, tiny.config(tmp_path, optim=optim))


@pytest.mark.parametrize("comm", COMMS)
def test_a_loss_that_is_not_finite_stops_every_rank_and_keeps_the_batch(comm, tmp_path):
    config = tiny.config(tmp_path, comm)
    errors = run_ranks(2, _train_with_a_nan, config)
    for error in errors:
        assert "step 4: the loss is not finite on rank 1 (nan, batch saved as " in error
    assert [p.name for p in tmp_path.iterdir()] == ["nonfinite_step4_rank1.pt"]
    saved = torch.load(tmp_path / "nonfinite_step4_rank1.pt", weights_only=True)
    assert saved["dense"].isnan().any()
    assert saved["keys"][0] == "cat_0"
    assert len(saved["lengths"]) == 5 * len(saved["labels"])


def _train_with_a_nan(config):
    from trainers.families import make_engine
    from trainers.loop import NonFiniteLossError

    def batches(data, model, split, rank, world, start):
        for number, batch in enumerate(tiny.build_batches(data, model, split, rank, world, start)):
            if number == 3 and rank == 1:
                batch.dense[0, 0] = math.nan
            yield batch

    try:
        tiny.run_loop(config, make_engine(config), Progress(), batches)
    except NonFiniteLossError as error:
        return str(error)
    return "trained"


def test_evaluates_and_limits_batches(tmp_path):
    trainer = {"steps": 7, "eval_every": 3, "eval_batches": 2}
    records = run_ranks(2, tiny.train, tiny.config(tmp_path, trainer=trainer))[0]
    evaluations = [r for r in records if r["event"] == "eval"]
    assert [(r["step"], r["samples"]) for r in evaluations] == [(3, 48), (6, 48), (7, 48)]


def test_profiles_after_warm_up(tmp_path):
    run_ranks(1, tiny.train, tiny.config(tmp_path, trainer={"steps": 5, "warmup": 2, "profile_steps": 2}))
    assert '"traceEvents"' in (tmp_path / "trace_rank0.json").read_text()


def test_the_schedule_reaches_the_updates(tmp_path):
    """A learning rate of zero from step 3 on leaves every later loss on the same batch the same."""
    optim = {"decay_start": 2, "decay_steps": 0}
    configs = [tiny.config(tmp_path, comm, optim=optim, trainer={"steps": 6}) for comm in COMMS]
    for records in run_ranks(2, _train_on_one_batch, configs)[0]:
        loss = tiny.losses(records)
        assert loss[0] > loss[1] > loss[2]
        assert loss[2:] == [loss[2]] * 4
        assert [r["lr"] for r in records if r["event"] == "train"] == [0.5, 0.5, 0, 0, 0, 0]


def _train_on_one_batch(configs):
    from trainers.families import make_engine

    def batches(data, model, split, rank, world, start):
        for _ in range(8):
            yield next(tiny.build_batches(data, model, "train", rank, world, 0))

    return [tiny.run_loop(config, make_engine(config), Progress(), batches) for config in configs]
