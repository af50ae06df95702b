import json
import math
import statistics

import pytest

from trainers.run_summary import (
    FILE_NAME,
    MEDIANS,
    SUMMARY_KEYS,
    RunFacts,
    StepStatistics,
    backend_that_ran,
    counter_rows,
    with_earlier_figures,
    write_summary,
)

FACTS = {"comm": "fused", "ranks": 2, "seed": 1, "model": "tiny", "data": "synthetic", "data_is_synthetic": True}


def facts(**more):
    return RunFacts(**FACTS, device="cpu", run_dir="runs/a", **more)


def train(step, step_ms, loss=0.5):
    return {"event": "train", "step": step, "loss": loss, **dict.fromkeys(MEDIANS, 1.0), "step_ms": step_ms}


def test_medians_leave_out_the_warm_up():
    times = [1000.0, 500.0, 3.0, 9.0, 4.0, 5.0, 6.0]
    collected = StepStatistics(warmup=2)
    for step, step_ms in enumerate(times, start=1):
        collected.add(train(step, step_ms, loss=1.0 / step))
    summary = collected.summary(facts(backend="host"), "ok")
    assert tuple(summary) == SUMMARY_KEYS
    assert summary["step_ms"] == statistics.median(times[2:]) == 5.0
    assert (summary["measured_steps"], summary["steps"]) == (5, 7)
    assert summary["step_ms_p25"] < 5.0 < summary["step_ms_p75"]
    assert summary["final_loss"] == pytest.approx(1 / 7)
    assert (summary["backend"], summary["status"], summary["versions"]["torch"][0]) == ("host", "ok", "2")


def test_a_resumed_run_warms_up_again():
    collected = StepStatistics(warmup=1)
    for step, step_ms in ((101, 900.0), (102, 5.0), (103, 5.0)):
        collected.add(train(step, step_ms))
    summary = collected.summary(facts(), "ok")
    assert (summary["step_ms"], summary["steps"]) == (5.0, 103)


def test_nothing_but_warm_up_has_no_medians_and_says_so():
    collected = StepStatistics(warmup=20)
    collected.add(train(1, 5.0))
    summary = collected.summary(facts(warnings=["first"]), "ok")
    assert all(summary[key] is None for key in MEDIANS)
    assert summary["warnings"] == ["first", "1 steps, all of them warm-up (trainer.warmup=20): no medians"]


def test_the_last_evaluation_counts():
    collected = StepStatistics(warmup=0)
    collected.add({"event": "eval", "step": 1, "loss": 0.7, "auc": 0.5, "ne": 1.0, "warnings": ["AUC is 0.5"]})
    collected.add({"event": "eval", "step": 2, "loss": 0.6, "auc": 0.7, "ne": 0.9, "warnings": []})
    summary = collected.summary(facts(), "ok")
    assert [summary[key] for key in ("eval_loss", "auc", "ne", "warnings")] == [0.6, 0.7, 0.9, []]


def test_nothing_left_to_train_keeps_the_figures_of_the_run_that_trained_here(tmp_path):
    trained, nothing = StepStatistics(warmup=0), StepStatistics(warmup=0)
    trained.add(train(1, 5.0))
    for collected, auc in ((trained, 0.6), (nothing, 0.7)):
        collected.add({"event": "eval", "step": 1, "loss": 0.5, "auc": auc, "ne": 1.0, "warnings": []})
    fresh = nothing.summary(facts(), "ok")
    assert (fresh["steps"], fresh["final_loss"]) == (1, None)
    assert with_earlier_figures(tmp_path, fresh) == fresh
    write_summary(tmp_path, trained.summary(facts(), "ok"))
    kept = with_earlier_figures(tmp_path, fresh)
    assert (kept["step_ms"], kept["final_loss"], kept["auc"]) == (5.0, 0.5, 0.7)
    assert with_earlier_figures(tmp_path, {**fresh, "steps": 2})["step_ms"] is None


def test_a_run_that_failed_before_its_first_step_has_every_key():
    summary = StepStatistics(warmup=5).summary(facts(), "failed", "ValueError: no such file")
    assert tuple(summary) == SUMMARY_KEYS
    assert (summary["steps"], summary["final_loss"], summary["status"]) == (0, None, "failed")


def test_the_file_is_whole_and_valid_json(tmp_path):
    collected = StepStatistics(warmup=0)
    collected.add(train(1, 5.0, loss=math.nan))
    path = write_summary(tmp_path, collected.summary(facts(), "failed", "non-finite loss"))
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME] == [path.name]
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written["final_loss"] is None
    assert written["non_finite"] == {"final_loss": "nan"}


def test_bad_arguments():
    with pytest.raises(ValueError, match="warmup is -1"):
        StepStatistics(warmup=-1)
    with pytest.raises(ValueError, match="status is 'done'; allowed: ok, failed"):
        StepStatistics(warmup=0).summary(facts(), "done")


def test_counters_and_the_backend_that_ran():
    rows = counter_rows({("embedding_all_to_all", "host", ""): 30, ("all_to_all", "baseline", "two hosts"): 2})
    assert rows[0] == {"operator": "all_to_all", "backend": "baseline", "reason": "two hosts", "calls": 2}
    assert backend_that_ran(rows) == "baseline+host"
    assert backend_that_ran(rows[1:]) == "host"
    kernels = {"operator": "embedding_all_to_all_kernels", "backend": "fbgemm", "reason": "baseline", "calls": 9}
    assert backend_that_ran([*rows[1:], kernels]) == "host"
    assert backend_that_ran([]) is None
