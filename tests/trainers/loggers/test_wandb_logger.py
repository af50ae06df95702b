"""Offline runs are read back from the file that `wandb sync` would send."""

import json
import time

import pytest
import wandb
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal import datastore

from trainers.config import LoggerConfig
from trainers.loggers import make_loggers, wandb_logger

CONFIG = {"comm": {"mode": "fused"}, "optim": {"lr": 0.1}}


@pytest.fixture(autouse=True)
def _quiet_and_unreachable(monkeypatch, tmp_path):
    """No credentials, and a server that would never answer: whatever waits for it fails the test."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_BASE_URL", "http://192.0.2.1")  # reserved for documentation, routed nowhere
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()
    yield
    wandb.teardown()


def make(run_dir, **settings):
    return make_loggers(LoggerConfig(kind="wandb", **settings), run_dir, rank=0)


def records(run_dir):
    """The records of each offline run under `run_dir`, oldest first."""
    wandb.teardown()  # its service process may still be writing what a finished run left it
    runs = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        store = datastore.DataStore()
        store.open_for_scan(str(path))
        found = []
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
        runs.append(found)
    return runs


def history(found):
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items})
    return rows


def the(found, kind):
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def test_an_offline_run_is_complete(tmp_path):
    begin = time.monotonic()
    with make(tmp_path, group="lr_sweep", tags=["nightly"]) as loggers:
        loggers.start(CONFIG)
        loggers.log({"event": "train", "step": 1, "loss": 0.7, "step_ms": 9.5})
        loggers.log({"event": "eval", "step": 1, "auc": 0.6, "warnings": []})
        loggers.finish("ok", summary={"backend": "host", "step_ms": 9.5, "auc": 0.6, "data_is_synthetic": True})
    assert time.monotonic() - begin < 30
    (found,) = records(tmp_path)
    runs = the(found, "run")
    assert (runs[0].project, runs[0].run_group, runs[0].run_id) == ("fusecomm", "lr_sweep", loggers.run_id)
    assert list(runs[-1].tags) == ["fused", "nightly", "host"]
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["comm"] == {"mode": "fused"}
    assert config["optim"] == {"lr": 0.1}
    rows = history(found)
    assert [row["trainer/step"] for row in rows] == [1, 1]
    assert (rows[0]["train/loss"], rows[1]["eval/auc"]) == (0.7, 0.6)
    metrics = {metric.name or metric.glob_name: metric.step_metric for metric in the(found, "metric")}
    assert metrics["train/*"] == metrics["eval/*"] == "trainer/step"
    summary = {}
    for record in the(found, "summary"):
        summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.update}
    assert summary["summary/step_ms"] == 9.5
    assert "summary/data_is_synthetic" not in summary
    assert summary["status"] == "ok"
    assert [record.exit_code for record in the(found, "exit")] == [0]


def test_resume_keeps_the_id_and_the_order_of_steps(tmp_path):
    with make(tmp_path) as loggers:
        loggers.start(CONFIG)
        for step in (1, 2, 3):
            loggers.log({"event": "train", "step": step, "loss": 1.0})
        kept = loggers.run_id
    time.sleep(1.1)  # W&B names its directories by the second
    with make(tmp_path) as loggers:
        loggers.start(CONFIG, run_id=kept)
        assert loggers.run_id == kept
        loggers.log({"event": "train", "step": 3, "loss": 0.9})  # one step back: to the checkpoint
    first, second = records(tmp_path)
    assert the(first, "run")[0].run_id == the(second, "run")[0].run_id == kept
    assert [row["trainer/step"] for row in history(second)] == [3]


def test_an_exception_finishes_the_run_with_an_exit_code(tmp_path):
    def fail():
        with make(tmp_path) as loggers:
            loggers.start(CONFIG)
            loggers.log({"event": "train", "step": 1, "loss": 1.0})
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert wandb.run is None
    (found,) = records(tmp_path)
    assert [record.exit_code for record in the(found, "exit")] == [1]


def test_online_without_a_key_is_one_clear_error(tmp_path):
    loggers = make(tmp_path, wandb_mode="online")
    with pytest.raises(RuntimeError, match=r"needs a W&B key .* logger\.wandb_mode=offline"), loggers:
        loggers.start(CONFIG)
    assert not (tmp_path / "wandb").exists()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["status"] == "failed"


def test_an_unreachable_server_is_an_error_and_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_logger, "INIT_TIMEOUT_S", 2.0)
    begin = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"did not start: .* logger\.wandb_mode=offline"),
        make(tmp_path, wandb_mode="online") as loggers,
    ):
        loggers.start(CONFIG)
    assert time.monotonic() - begin < 60


def test_misspelt_mode(tmp_path):
    with pytest.raises(ValueError, match="'onlin'; allowed: offline, online, disabled"):
        make(tmp_path, wandb_mode="onlin")
