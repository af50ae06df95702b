"""The operator benchmark: settings are checked, and a small run on two ranks writes complete, plausible rows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from launch.bench import __main__ as bench
from launch.bench import facts
from launch.bench.ranks import positions
from launch.bench.settings import SettingsError, backends, parse, shapes
from launch.bench.variants import quantiles

ROOT = Path(__file__).parents[2]
ROW_FIELDS = {"op", "backend", "device", "link", "ranks", "dtype", "phase", "ms", "limit_ms", "torch", "fusecomm"}
SMALL = ["ranks=2", "rounds=1", "iterations=2", "warmup=1", "rotate=2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["poling=3"], "unknown key 'poling' .did you mean 'pooling'"),
        (["pooling"], "expected key=value"),
        (["op=gemm"], "op must be one of all_to_all, embedding_all_to_all"),
        (["ranks=two"], "ranks"),
        (["ranks=0"], "ranks must be at least 1"),
        (["pooling=[1,-2]"], "pooling must be a whole number from 0 up, 'criteo'"),
        (["dim=criteo"], "dim must be a whole number from 1 up, or a list"),
        (["dtype=bf16"], "no baseline to time"),
        (["device=tpu"], "device must be one of cpu, cuda"),
        (["backends=[baseline,cuda]"], "backends must be one of baseline, unfused, host"),
        (["ranks_per_gpu=2"], "ranks_per_gpu=2 is for device=cuda"),
        (["link=pinned"], "link=pinned is for device=cuda"),
        (["timeout_s=0"], "timeout_s must be positive"),
        (["device=cuda", "link=[peer,nvlink]"], "link must be one of auto, peer, pinned"),
        (["device=cuda", "ranks=4", "ranks_per_gpu=2"], "ranks=4 with ranks_per_gpu=2 need 2 GPUs, torch sees 1"),
        (["device=cuda", "ranks=3", "ranks_per_gpu=4"], "ranks=3 do not fill cards of ranks_per_gpu=4"),
        (["device=cuda", "mps=maybe"], "mps must be one of on, off"),
        (
            ["device=cuda", "ranks=1", "configs=nowhere"],
            "there is no .*nowhere.yaml; lists in launch/bench/lists: one_gpu",
        ),
        (["device=cuda", "ranks=1", "configs=one_gpu"], "has no configuration for ranks=1 and link=auto"),
        (["op=all_to_all", "configs=one_gpu"], "are shapes of embedding_all_to_all, and op=all_to_all"),
    ],
)
def test_bad_settings_are_one_clear_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=message):
        parse(words)
    assert bench.main(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_setting_of_nccl_that_would_hide_the_search_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    with pytest.raises(SettingsError, match="unset NCCL_MAX_CTAS"):
        parse(["device=cuda"])


def test_what_the_lab_lacks_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PATH", "/nowhere")
    assert bench.main(["device=cuda", "ranks=2", "ranks_per_gpu=2", "backends=unfused"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("launch.bench: nvidia-cuda-mps-control is not on PATH")


def test_lists_are_swept():
    swept = list(shapes(parse(["pooling=[1,20,criteo]", "dim=[16,64,128]", "dtype=[fp32,fp16]"])))
    assert [(s.dtype, s.pooling, s.dim) for s in swept] == [
        (t, p, d) for t in ("fp32", "fp16") for d in (16, 64, 128) for p in (1, 20, "criteo")
    ]


def test_links_and_configurations_make_blocks_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = parse(["device=cuda", "ranks=4", "ranks_per_gpu=4", "configs=one_gpu", "link=[peer,pinned]"])
    blocks = positions(settings)
    links = [link for link, _ in blocks]
    assert links == sorted(links)
    assert (links.count("peer"), links.count("pinned")) == (20, 10)
    assert blocks[0][1].configuration == "t8-d128-p1-b8k"
    assert backends(settings) == ["baseline", "unfused", "cuda", "triton"]
    assert backends(parse(["op=all_to_all"])) == ["baseline", "host"]


def test_medians_leave_out_rounds_that_were_not_taken():
    nan = float("nan")
    [(median, low, high), (other, _, _)] = quantiles(torch.tensor([[1.0, 2.0, 9.0, nan], [4.0, nan, nan, nan]]))
    assert (median, other) == (2.0, 4.0)
    assert 1.0 < low < 2.0 < high < 9.0


def test_the_commit_may_be_named(monkeypatch):
    monkeypatch.setenv("FUSECOMM_COMMIT", "abc1234")
    assert facts.commit() == "abc1234"
    monkeypatch.delenv("FUSECOMM_COMMIT")
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts.commit() is None


def test_embedding_rows(tmp_path, capsys):
    out = tmp_path / "rows.json"
    shape = ["tables=2", "rows=500", "dim=16", "pooling=[3,criteo]", "batch=65"]
    assert bench.main(["op=embedding_all_to_all", *shape, *SMALL, f"out={out}"]) == 0
    rows = json.loads(out.read_text())
    assert [row["pooling"] for row in rows] == [3] * 10 + ["criteo"] * 10
    for block in (rows[:10], rows[10:]):
        assert {(row["backend"], row["phase"]) for row in block} == {
            *((b, p) for b in ("baseline", "unfused", "host") for p in ("forward", "forward_backward")),
            *((b, p) for b in ("baseline", "host") for p in ("compute_alone", "exchange_alone")),
        }
    for row in rows:
        assert row.keys() >= ROW_FIELDS | {"tables_per_rank", "rows", "dim", "pooling", "batch"}
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["ms"] > 0
        assert row["link"] == "CPU host"
    assert all((row["limit_ms"] or 0) > 0 for row in rows if row["phase"] == "forward")
    assert {row["kernels"] for row in rows if row["backend"] == "baseline"} == {"fbgemm"}
    assert "/ baseline" in capsys.readouterr().out


def test_all_to_all_rows(tmp_path):
    out = tmp_path / "rows.json"
    assert bench.main(["op=all_to_all", "kib=[1,8]", *SMALL, f"out={out}"]) == 0
    rows = json.loads(out.read_text())
    assert [(r["kib"], r["backend"]) for r in rows] == [(k, b) for k in (1, 8) for b in ("baseline", "host")]


def test_sigterm_leaves_no_rank_and_keeps_the_rows_so_far(tmp_path):
    out = tmp_path / "rows.json"
    words = ["op=all_to_all", "kib=[1,2]", "ranks=2", "rounds=1", "iterations=2", f"out={out}"]
    # The second shape takes for ever.
    script = (
        "import sys, launch.bench.host_session as h; original = h.HostSession.begin\n"
        "def begin(self, link, shape):\n    import time\n    time.sleep(1000 if shape.kib == 2 else 0)\n"
        "h.HostSession.begin = begin\n"
    )
    (tmp_path / "sitecustomize.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "launch.bench", *words]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert any(b"kib 1" in line for line in run.stdout)
        ranks = psutil.Process(run.pid).children(recursive=True)
        assert len(ranks) >= 2
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    assert {row["kib"] for row in json.loads(out.read_text())} == {1}


def test_a_rank_that_hangs_or_fails_ends_the_run(tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "launch.bench", "op=all_to_all", "kib=1", "ranks=2", "timeout_s=3"]
    for body, said in (
        ("import time; time.sleep(1000)", "no word from the ranks"),
        ("raise OSError('broken')", "broken"),
    ):
        script = f"import launch.bench.host_session as h\ndef begin(*_):\n    {body}\nh.HostSession.begin = begin\n"
        (tmp_path / "sitecustomize.py").write_text(script)
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert time.monotonic() - began < 40
