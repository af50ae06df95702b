"""`run` as a launcher calls it: every rank a process that ends when its run does."""

import json
import os
import re
import signal
import socket
import time

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainers import tiny
from trainers import checkpoint, run_summary
from trainers.loggers import read_events
from trainers.run import run


def _ranks(world, function, *args, **options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return run_ranks(world, function, *args, backend="", env=env, **options)


def _config(path, comm="baseline", **groups):
    groups.setdefault("trainer", {"steps": 12, "warmup": 2, "checkpoint_every": 5})
    return tiny.config(path, comm, data={"batch_size": 25}, **groups)


def _run(config):
    return run(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_a_run_leaves_records_summary_and_checkpoints(comm, tmp_path):
    summaries = _ranks(2, _run, _config(tmp_path, comm))
    summary = json.loads((tmp_path / run_summary.FILE_NAME).read_text())
    assert summary["status"] == summaries[0]["status"] == "ok"
    assert (summary["comm"], summary["ranks"], summary["steps"], summary["measured_steps"]) == (comm, 2, 12, 10)
    assert summary["backend"] == ("baseline" if comm == "baseline" else "host")
    assert summary["data_is_synthetic"] is True
    parts = sum(summary[key] for key in ("data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms"))
    assert 0.5 * summary["step_ms"] < parts < 1.5 * summary["step_ms"]
    assert summary["exposed_comm_ms"] > 0
    events = read_events(tmp_path / "metrics.jsonl")
    assert [e["event"] for e in events] == ["start", *["train"] * 12, "eval", "end"]
    for event in events[1:13]:
        timed = sum(event[key] for key in ("data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms"))
        assert timed == pytest.approx(event["step_ms"])
        assert min(event["data_ms"], event["index_dist_ms"], event["compute_ms"], event["exposed_comm_ms"]) >= 0
    assert events[-2]["samples"] == 16 * 25
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_10", "step_12"]


def _fail_on_rank_1(config):
    def batches(data, model, split, rank, world, start):
        for number, batch in enumerate(tiny.build_batches(data, model, split, rank, world, start)):
            if number == 7 and rank == 1:
                raise OSError("the disk is gone")
            yield batch

    _run_and_leave(config, batches)


def _die_on_rank(config, victim):
    def batches(data, model, split, rank, world, start):
        for number, batch in enumerate(tiny.build_batches(data, model, split, rank, world, start)):
            if number == 7 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    _run_and_leave(config, batches)


def _run_and_leave(config, batches):
    try:
        run(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), batches)
    except Exception as error:
        with open(f"{config.run_dir}/rank{os.environ['RANK']}", "w") as file:
            file.write("\n".join([str(error), *error.__notes__]))
        os._exit(1)  # as a launcher does: the others notice


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_a_rank_that_fails_ends_all_and_is_named(comm, tmp_path):
    start = time.monotonic()
    _ranks(3, _fail_on_rank_1, _config(tmp_path, comm), may_die={0, 1, 2})
    assert time.monotonic() - start < 40
    summary = json.loads((tmp_path / run_summary.FILE_NAME).read_text())
    assert summary["status"] == "failed"
    assert summary["reason"] == "OSError on rank 1: the disk is gone"
    assert summary["steps"] in (5, 6, 7)
    assert summary["backend"] == ("baseline" if comm == "baseline" else "host")
    for rank in range(3):
        assert "OSError on rank 1: the disk is gone" in (tmp_path / f"rank{rank}").read_text()
    assert read_events(tmp_path / "metrics.jsonl")[-1]["status"] == "failed"


def test_a_finished_run_started_again_keeps_its_figures(tmp_path):
    first = _ranks(1, _run, _config(tmp_path, "fused"))[0]
    again = _config(tmp_path, "fused", trainer={"steps": 12, "warmup": 2, "resume": "auto"})
    assert _ranks(1, _run, again)[0] == first
    assert json.loads((tmp_path / run_summary.FILE_NAME).read_text()) == first
    assert first["step_ms"] > 0


@pytest.mark.parametrize(("comm", "victim"), [("baseline", 1), ("fused", 0)])
def test_a_killed_rank_ends_all_and_the_newest_checkpoint_resumes(comm, victim, tmp_path):
    start = time.monotonic()
    _ranks(2, _die_on_rank, _config(tmp_path, comm), victim, may_die={0, 1})
    assert time.monotonic() - start < 30
    summary = json.loads((tmp_path / run_summary.FILE_NAME).read_text())
    assert summary["status"] == "failed"
    assert re.search(rf"process of rank {victim} has ended|the end of rank {victim}'s process", summary["reason"])
    assert checkpoint.find("auto", tmp_path).name == "step_5"
    resumed = _config(tmp_path, comm, trainer={"steps": 12, "warmup": 2, "resume": "auto"})
    summary = _ranks(2, _run, resumed)[0]
    assert (summary["status"], summary["steps"]) == ("ok", 12)
    steps = [e["step"] for e in read_events(tmp_path / "metrics.jsonl") if e["event"] == "train"]
    assert steps[-7:] == [6, 7, 8, 9, 10, 11, 12]


def test_going_back_to_an_earlier_step_leaves_the_later_checkpoints_out(tmp_path):
    trainer = {"steps": 12, "warmup": 2, "checkpoint_every": 4, "keep_checkpoints": 3}
    _ranks(1, _run, _config(tmp_path, trainer=trainer))
    earlier = str(tmp_path / "checkpoints" / "step_4")
    evaluation = {**trainer, "steps": 4, "resume": earlier}
    _ranks(1, _run, _config(tmp_path, trainer=evaluation))  # trains nothing, so nothing is in its way
    assert checkpoint.find("auto", tmp_path).name == "step_12"
    branch = {"steps": 6, "warmup": 2, "checkpoint_every": 6, "keep_checkpoints": 1, "resume": earlier}
    _ranks(1, _run, _config(tmp_path, trainer=branch))
    assert checkpoint.find("auto", tmp_path).name == "step_6"
    kept = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"step_6", "step_8.abandoned", "step_12.abandoned"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"trainer.device=cuda, but torch .* finds no GPU; allowed here: cpu"):
        run(_config(tmp_path, trainer={"device": "cuda"}), 0, 1)
