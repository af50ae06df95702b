"""A sweep: a torchrun job for each combination, in a directory of its own, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from tests.launch.commands import PYTHON, environment, run


def jobs_of(tmp_path: Path) -> list[Path]:
    [sweep] = (tmp_path / "outputs" / "sweeps").iterdir()
    return sorted(path for path in sweep.iterdir() if path.is_dir())


def test_a_failed_job_is_named_and_stops_nothing(tmp_path: Path) -> None:
    arguments = ["-m", "comm=baseline,fusd", "logger.tags=[fail],[]", "optim.lr=0.25", "hydra.launcher.max_parallel=2"]
    done = run(PYTHON, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    failed, good, *misspelt = jobs_of(tmp_path)
    assert {path.name for path in good.iterdir()} == {"config.yaml", "train.log", "rank_0_of_2", "rank_1_of_2"}
    config = OmegaConf.load(good / "config.yaml")
    assert (config.comm.mode, config.optim.lr, config.logger.group) == ("baseline", 0.25, good.parent.name)
    assert "trained on rank 1" in (good / "train.log").read_text()

    table = done.stdout.partition("1 of 4 jobs succeeded")[2].splitlines()
    rows = {line.split()[0]: line for line in table if line.strip()[:1].isdigit()}
    reasons = {line.split()[0]: table[i + 1] for i, line in enumerate(table) if line.strip()[:1].isdigit()}
    assert "ok" in rows["1"]
    assert "exit 1" in rows["0"]
    assert "comm=baseline logger.tags=[fail] optim.lr=0.25" in rows["0"]
    assert str(failed / "train.log") in rows["0"]
    assert "RuntimeError: asked to fail" in reasons["0"]
    for job in misspelt:
        assert "did you mean 'fused'?" in reasons[job.name]
        assert {path.name for path in job.iterdir()} == {"train.log"}


def test_a_sweep_file_runs_and_all_good_is_exit_code_0(tmp_path: Path) -> None:
    done = run(PYTHON, "sweep=comm", "hydra.launcher.nproc_per_node=1", "model=dlrm_kaggle", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    modes = [OmegaConf.load(job / "config.yaml").comm.mode for job in jobs_of(tmp_path)]
    assert modes == ["baseline", "fused"]
    assert all((job / "rank_0_of_1").exists() for job in jobs_of(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra/launcher=basic"], "would train every job in one process"),
        (["hydra.launcher.nproc_per_node=0"], "hydra.launcher.nproc_per_node=0 must be an integer of at least 1"),
        (["hydra.launcher.max_paralel=2"], "did you mean 'hydra.launcher.max_parallel'?"),
    ],
)
def test_a_sweep_that_cannot_start_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(PYTHON, "-m", "comm=baseline,fused", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_sweep_never_writes_over_another(tmp_path: Path) -> None:
    (tmp_path / "mine" / "0").mkdir(parents=True)
    done = run(PYTHON, "-m", "comm=baseline,fused", "hydra.sweep.dir=mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "exists already; choose another hydra.sweep.dir" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_no_process_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    arguments = ["-m", "comm=baseline,fused", "logger.tags=[hang]", "hydra.sweep.dir=sweep"]
    sweep = subprocess.Popen([*PYTHON, *arguments], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    ranks = [tmp_path / "sweep" / "0" / f"rank_{rank}_of_2" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in ranks):
        assert time.monotonic() < deadline
        assert sweep.poll() is None
        time.sleep(0.1)
    family = psutil.Process(sweep.pid).children(recursive=True)
    assert len(family) >= 3  # torchrun and its two ranks
    os.kill(sweep.pid, number)
    assert sweep.wait(40) == code
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert not (tmp_path / "sweep" / "1").exists()
