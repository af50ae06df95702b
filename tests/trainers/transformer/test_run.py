"""`run` of a Transformer as a launcher calls it: records, summary, and the end of a job whose rank was killed."""

import json
import os
import re
import signal

import pytest

from tests.trainers import test_run
from tests.trainers.transformer import small
from trainers import checkpoint
from trainers.loggers import read_events
from trainers.transformer.batches import build_batches


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small.make_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("comm", ["baseline", "fused", "auto"])
def test_a_run_leaves_records_and_a_summary(comm, text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = small.config(tmp_path, text, comm, engine={"sequence_parallel": comm == "auto"})
    summary = test_run._ranks(2, test_run._run, config)[0]
    assert (summary["status"], summary["comm"], summary["steps"]) == ("ok", comm, 12)
    assert summary["perplexity"] > 1
    assert summary["tokens_per_s"] == pytest.approx(summary["samples_per_s"] * small.LENGTH)
    assert (summary["auc"], summary["mfu"], summary["data_is_synthetic"]) == (None, None, False)
    counted = {row["operator"] for row in summary["counters"] if row["calls"]}
    if comm == "auto":
        assert counted == {"gemm_reduce_scatter", "all_gather_gemm"}
        assert set(summary["backend"].split("+")) <= {"baseline", "host"}
    else:
        assert counted == {"gemm_all_reduce"}
        assert summary["backend"] == ("baseline" if comm == "baseline" else "host")
    assert summary["exposed_comm_ms"] > 0
    events = read_events(tmp_path / "metrics.jsonl")
    assert [e["event"] for e in events] == ["start", *["train"] * 12, "eval", "end"]
    for event in events[1:13]:
        timed = sum(event[key] for key in ("data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms"))
        assert timed == pytest.approx(event["step_ms"])
    rates = [event["lr"] for event in events[1:13]]
    assert rates[2] == max(rates) == config.optim.lr
    assert rates[-1] < 0.1 * rates[2]


def _die_on_rank_1(config):
    def batches(data, model, split, replica, replicas, start):
        for number, batch in enumerate(build_batches(data, model, split, replica, replicas, start)):
            if number == 7 and os.environ["RANK"] == "1":
                open(f"{config.run_dir}/died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    test_run._run_and_leave(config, batches)


@pytest.mark.parametrize(
    ("comm", "engine"),
    [
        ("fused", {}),
        ("fused", {"sequence_parallel": True}),
        ("baseline", {}),
        ("fused", {"tensor_parallel": 1, "kind": "deepspeed"}),
    ],
    ids=["fused", "fused_sequence_parallel", "baseline", "deepspeed"],
)
def test_a_killed_rank_ends_all_and_the_newest_checkpoint_resumes(comm, engine, text, tmp_path):
    config = small.config(tmp_path, text, comm, engine=engine, trainer={"checkpoint_every": 5})
    test_run._ranks(2, _die_on_rank_1, config, may_die={0, 1}, timeout=180)
    died = (tmp_path / "died").stat().st_mtime
    assert (tmp_path / "summary.json").stat().st_mtime - died < 20
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert re.search(r"process of rank 1 has ended|the end of rank 1's process", summary["reason"])
    assert checkpoint.find("auto", tmp_path).name == "step_5"
    resumed = small.config(tmp_path, text, comm, engine=engine, trainer={"resume": "auto"})
    summary = test_run._ranks(2, test_run._run, resumed, timeout=180)[0]
    assert (summary["status"], summary["steps"]) == ("ok", 12)
