import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import RankError, run_ranks
from tests.trainers import tiny
from trainers import checkpoint
from trainers.checkpoint import CheckpointError, Progress

WIDE = {"embedding_dim": 64, "table_rows": [50, 60, 70], "multi_hot_sizes": [1, 4, 9], "bottom_mlp": [64]}
OPTIMS = [
    {"name": "sgd"},
    {"name": "adagrad", "lr": 0.1},
    {"name": "rowwise_adagrad", "lr": 0.1},
    {"name": "sgd", "in_backward": False},
    {"name": "adagrad", "lr": 0.1, "in_backward": False},
    {"name": "rowwise_adagrad", "lr": 0.1, "in_backward": False},
    {"name": "adam", "lr": 0.01, "in_backward": False},
]


def _train_and_go_on(whole, first, second):
    """Losses of a whole run, and of one that stops, is saved and goes on in a fresh engine; and draws after each."""
    checkpoint.seed_generators(7, 0)
    straight = tiny.losses(tiny.train(whole)), _draws()
    checkpoint.seed_generators(7, 0)
    before = tiny.losses(tiny.train(first))
    checkpoint.seed_generators(8, 0)
    after, progress, notes = _resume(second)
    return straight, (before + after, _draws()), progress, notes


def _draws():
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def _resume(config):
    from trainers.families import make_engine

    engine = make_engine(config)
    progress, notes = checkpoint.load(config, engine, checkpoint.find(config.trainer.resume, config.run_dir))
    losses = tiny.losses(tiny.run_loop(config, engine, progress))
    engine.close()
    return losses, progress, notes


def _resume_all(configs):
    return [_resume(config) for config in configs]


def _stopping(path, comm, optim, **model):
    """Saves at step 6 of 12; the schedule's warm-up spans the stop."""
    return tiny.config(
        path, comm, optim={**optim, "warmup_steps": 10}, trainer={"steps": 6, "checkpoint_every": 6}, model=model
    )


def _going_on(path, source, comm, optim, **model):
    return tiny.config(
        path, comm, optim={**optim, "warmup_steps": 10}, trainer={"steps": 12, "resume": str(source)}, model=model
    )


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_resumes_to_the_bit(comm, tmp_path):
    cases = [*OPTIMS, {"in_backward": False, "accumulate": 2, "clip_norm": 0.1}]
    runs = []
    for i, optim in enumerate(cases):
        path = tmp_path / str(i)
        whole = _going_on(path, "", comm, optim)
        runs.append((whole, _stopping(path, comm, optim), _going_on(path, path, comm, optim)))
    for results in run_ranks(2, _all_cases, runs, timeout=180):
        for straight, resumed, progress, notes in results:
            assert resumed == straight
            assert len(straight[0]) in (10, 12)  # 480 samples end sooner when two batches make a step
            assert progress.step == len(straight[0])
            assert notes == []


def _all_cases(runs):
    return [_train_and_go_on(*run) for run in runs]


def test_loads_at_other_numbers_of_ranks_and_under_the_other_comm(tmp_path):
    """Saved by 2 ranks; at 1, 2 and 4, with other column slices there, training goes on with the same losses."""
    optims = [OPTIMS[i] for i in (1, 2, 5)]
    stopping = [_stopping(tmp_path / str(i), "baseline", optim, **WIDE) for i, optim in enumerate(optims)]
    run_ranks(2, tiny.train_all, stopping, timeout=120)
    results = {}
    for world, comms in ((2, ("baseline", "fused")), (1, ("baseline",)), (4, ("fused",))):
        configs = [
            _going_on(tmp_path / f"{i}-{world}-{comm}", tmp_path / str(i), comm, optim, **WIDE)
            for comm in comms
            for i, optim in enumerate(optims)
        ]
        all_results = run_ranks(world, _resume_all, configs, timeout=180)[0]
        for comm in comms:
            results[world, comm], all_results = all_results[: len(optims)], all_results[len(optims) :]
    for i, optim in enumerate(optims):
        expected = results[2, "baseline"][i][0]
        for (world, comm), cases in results.items():
            losses, progress, notes = cases[i]
            assert progress.step == 12
            assert (notes == []) == (world == 2)
            # Slices of another width have row-wise states of their own, so later steps differ a little; the first doesn't.
            tolerance = 5e-3 if optim["name"] == "rowwise_adagrad" else 1e-5
            assert losses[0] == pytest.approx(expected[0], rel=1e-6), (world, comm, optim)
            assert losses == pytest.approx(expected, rel=tolerance), (world, comm, optim)
    assert "2 ranks loaded on 4: random generators are seeded anew" in results[4, "fused"][0][2][0]


def test_keeps_the_newest_and_clears_leftovers(tmp_path):
    config = tiny.config(
        tmp_path, trainer={"steps": 7, "checkpoint_every": 2, "keep_checkpoints": 2}, data={"num_samples": None}
    )
    half = tmp_path / "checkpoints" / "step_9.tmp"
    half.mkdir(parents=True)
    (half / "meta.json").write_text("{")
    run_ranks(2, _train_briefly, config)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_6", "step_7"]
    assert checkpoint.find("auto", tmp_path).name == "step_7"
    assert checkpoint.find(str(tmp_path / "checkpoints" / "step_6"), "/nowhere").name == "step_6"
    meta = json.loads((tmp_path / "checkpoints" / "step_7" / "meta.json").read_text())
    assert (meta["step"], meta["batches"], meta["ranks"]) == (7, 7, 2)


def _train_briefly(config):
    from trainers.families import make_engine

    def batches(data, model, split, rank, world, start):
        limit = 1 << 20 if split == "train" else 2
        for _, batch in zip(range(limit), tiny.build_batches(data, model, split, rank, world, start), strict=False):
            yield batch

    tiny.run_loop(config, make_engine(config), Progress(), batches)


def test_find_says_what_is_missing(tmp_path):
    assert checkpoint.find("auto", tmp_path) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        checkpoint.find(str(tmp_path), tmp_path)
    half = tmp_path / "checkpoints" / "step_3.tmp"
    half.mkdir(parents=True)
    (half / "meta.json").write_text("{}")
    for resume in (tmp_path, half):
        with pytest.raises(CheckpointError, match="no complete checkpoint there"):
            checkpoint.find(str(resume), tmp_path)


def test_another_architecture_is_refused_key_by_key(tmp_path):
    run_ranks(1, tiny.train, _stopping(tmp_path, "baseline", OPTIMS[0]))
    other = _going_on(tmp_path, tmp_path, "baseline", OPTIMS[1], top_mlp=[8, 1], table_rows=[50, 3, 120, 40, 8])
    with pytest.raises(RankError) as error:
        run_ranks(1, _resume, other)
    message = str(error.value)
    assert "model.top_mlp: [16, 1] -> [8, 1]" in message
    assert "model.table_rows: [50, 3, 120, 40, 7] -> [50, 3, 120, 40, 8]" in message
    assert "optim.name: sgd -> adagrad" in message
    assert "bottom_mlp" not in message


def test_other_data_is_said(tmp_path):
    run_ranks(1, tiny.train, _stopping(tmp_path, "baseline", OPTIMS[0]))
    other = _going_on(tmp_path, tmp_path, "baseline", OPTIMS[0])
    other.data.batch_size = 12
    notes = run_ranks(1, _resume, other)[0][2]
    assert notes == ["the data position may mean other samples now: data.batch_size: 24 -> 12"]


def test_nothing_is_saved_after_an_operator_recorded_an_error(tmp_path):
    config = _stopping(tmp_path, "baseline", OPTIMS[0])
    with pytest.raises(RankError, match="a recorded error"):
        run_ranks(1, _save_with_a_recorded_error, config)
    assert not (Path(tmp_path) / "checkpoints").exists()


def _save_with_a_recorded_error(config):
    import fused_ops
    from trainers.families import make_engine

    def recorded(group=None):
        raise fused_ops.CommunicationError("a recorded error")

    engine = make_engine(config)
    fused_ops.check_errors = recorded
    checkpoint.save(config, engine, Progress(step=3))


def _checkpoints(run_dir, *steps):
    for step in steps:
        path = run_dir / "checkpoints" / f"step_{step}"
        path.mkdir(parents=True)
        (path / "meta.json").write_text("{}")


def test_checkpoints_that_training_does_not_go_on_from_are_set_aside(tmp_path):
    _checkpoints(tmp_path, 3, 6, 9)
    folder = tmp_path / "checkpoints"
    assert checkpoint.set_aside(tmp_path, folder / "step_9") == []
    aside = checkpoint.set_aside(tmp_path, folder / "step_3")
    assert [p.name for p in aside] == ["step_6.abandoned", "step_9.abandoned"]
    assert checkpoint.find("auto", tmp_path).name == "step_3"
    assert checkpoint.find(str(aside[1]), tmp_path) == aside[1]  # and can still be asked for
    _checkpoints(tmp_path, 6)
    assert [p.name for p in checkpoint.set_aside(tmp_path, folder / "step_3")] == ["step_6.abandoned-1"]
    _checkpoints(tmp_path / "other", 4)
    assert [p.name for p in checkpoint.set_aside(tmp_path, tmp_path / "other" / "checkpoints" / "step_4")] == [
        "step_3.abandoned"
    ]
    assert checkpoint.find("auto", tmp_path) is None
    assert len(list(folder.iterdir())) == 4  # nothing is lost


def _save_onto_a_full_disk(config):
    """Files of this process end at 2000 bytes, as on a disk that fills up."""
    from trainers.families import make_engine

    engine = make_engine(config)
    checkpoint.save(config, engine, Progress(step=1))
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(config, engine, Progress(step=2))
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_checkpoint_that_cannot_be_written_is_one_error_and_leaves_the_older_one(tmp_path):
    config = tiny.config(tmp_path, trainer={"keep_checkpoints": 1})
    for message in run_ranks(2, _save_onto_a_full_disk, config):
        assert "step_2 could not be written: rank 1: " in message
        assert "MB are free there" in message
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    _resume_config = tiny.config(tmp_path, trainer={"steps": 2, "resume": "auto"})
    assert run_ranks(2, _resume, _resume_config)[0][1].step == 2


def test_a_damaged_checkpoint_is_one_error(tmp_path):
    run_ranks(1, tiny.train, _stopping(tmp_path, "baseline", OPTIMS[0]))
    path = tmp_path / "checkpoints" / "step_6"
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(RankError, match=r"CheckpointError: \S+step_6 could not be read: rank 0: \w+"):
        run_ranks(1, _resume, _going_on(tmp_path, tmp_path, "baseline", OPTIMS[0]))
    (path / "meta.json").write_text('{"format": 1,')
    with pytest.raises(RankError, match=r"CheckpointError: \S+step_6/meta.json is damaged"):
        run_ranks(1, _resume, _going_on(tmp_path, tmp_path, "baseline", OPTIMS[0]))
