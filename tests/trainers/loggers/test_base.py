import subprocess
import sys
from pathlib import Path

import pytest

from trainers.config import LoggerConfig
from trainers.loggers import Loggers, make_loggers, read_events, sweep_name

ROOT = Path(__file__).resolve().parents[3]


class Recorder:
    def __init__(self, run_id=None, fails=False):
        self.run_id, self.fails, self.calls = run_id, fails, []

    def start(self, config, run_id=None):
        self.calls.append(("start", config, run_id))

    def log(self, event):
        self.calls.append(("log", event))

    def finish(self, status, reason=None, summary=None):
        self.calls.append(("finish", status, reason, summary))
        if self.fails:
            raise OSError("disk full")


def test_an_exception_finishes_every_logger_as_failed():
    recorders = [Recorder(), Recorder(run_id="abc")]

    def fail():
        with Loggers(recorders) as loggers:
            loggers.start({"a": 1}, "abc")
            loggers.log({"event": "train"})
            assert loggers.run_id == "abc"
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    for recorder in recorders:
        assert [call[0] for call in recorder.calls] == ["start", "log", "finish"]
        assert recorder.calls[-1] == ("finish", "failed", "OSError: no space", None)


def test_finish_happens_once():
    recorder = Recorder()
    with Loggers([recorder]) as loggers:
        loggers.finish("failed", "non-finite loss at step 7", {"steps": 7})
    assert recorder.calls == [("finish", "failed", "non-finite loss at step 7", {"steps": 7})]


def test_one_logger_that_cannot_finish_does_not_stop_the_others():
    recorders = [Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"):
        Loggers(recorders).finish("ok")
    assert recorders[1].calls


def test_a_failure_to_finish_does_not_hide_the_run_s_own_error():
    with pytest.raises(ValueError, match="the cause") as caught, Loggers([Recorder(fails=True)]):
        raise ValueError("the cause")
    assert "disk full" in caught.value.__notes__[0]


def test_unknown_status():
    with pytest.raises(ValueError, match="status is 'done'; allowed: ok, failed"):
        Loggers([]).finish("done")


@pytest.mark.parametrize("kind", ["tensorboard", ""])
def test_unknown_kind(tmp_path, kind):
    with pytest.raises(ValueError, match="allowed: jsonl, wandb"):
        make_loggers(LoggerConfig(kind=kind), tmp_path, rank=1)


def test_only_rank_0_of_two_processes_logs(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\n"
        "from trainers.config import LoggerConfig\n"
        "from trainers.loggers import make_loggers\n"
        "rank = int(os.environ['RANK'])\n"
        "with make_loggers(LoggerConfig(kind='wandb'), sys.argv[1], rank) as loggers:\n"
        "    loggers.start({'comm': {'mode': 'fused'}})\n"
        "    loggers.log({'event': 'train', 'step': 1, 'rank': rank})\n"
        "    assert (loggers.run_id is None) == (rank == 1)\n"
        "    print('rank', rank, 'done')\n"
    )
    run_dir = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.run(
        [*torchrun, str(script), str(run_dir)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert {"rank 0 done", "rank 1 done"} <= set(job.stdout.splitlines())
    assert [event.get("rank") for event in read_events(run_dir / "metrics.jsonl")] == [None, 0, None]
    assert len(list(run_dir.glob("wandb/offline-run-*"))) == 1


def test_group_is_the_sweep_s_directory(tmp_path):
    named, by_time = tmp_path / "lr_sweep", tmp_path / "2026-01-31" / "10-20-30"
    for sweep in (named, by_time):
        (sweep / "0").mkdir(parents=True)
        (sweep / "multirun.yaml").touch()
    assert sweep_name(named / "0") == "lr_sweep"
    assert sweep_name(by_time / "0") == "2026-01-31_10-20-30"
    assert sweep_name(tmp_path / "single") is None
