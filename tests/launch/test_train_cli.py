"""The command line of `launch.train`: one clear line for what is wrong, one directory for all ranks, exit codes."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launch.run_directory import claim
from tests.launch.commands import PYTHON, TORCHRUN_OF_TWO, environment, run

BAD = [
    ("comm=fusd", "comm has no option 'fusd' (allowed: auto, baseline, fused); did you mean 'fused'?"),
    ("trainer.stpes=3", "unknown key 'trainer.stpes'; did you mean 'trainer.steps'?"),
    ("+trainer.stpes=3", "unknown key 'trainer.stpes'; did you mean 'trainer.steps'?"),
    ("trainr.steps=3", "unknown key 'trainr.steps'; did you mean 'trainer.steps'?"),
    ("+speed=high", "unknown key 'speed'"),
    ("trainer.steps=3.5", "trainer.steps: '3.5' is not an integer"),
    ("trainer.steps=null", "trainer.steps: null is not allowed"),
    ("data.shuffle=maybe", "data.shuffle: 'maybe' is not true or false"),
    ("optim.lr=high", "optim.lr: 'high' is not a number"),
    ("model.bottom_mlp=3", "model.bottom_mlp: not a list; write [a,b,c]"),
    ("model.bottom_mlp=[a]", "model.bottom_mlp[0]: 'a' is not an integer"),
    ("comm=baseline,fused", "'comm=baseline,fused' has several values; sweep over them with -m"),
    ("steps", "can't read 'steps'; expected key=value"),
    ("data=criteo", "data=criteo needs data.path"),
    ("optim.clip_norm=1", "set optim.in_backward=false"),
    ("hydra/launcher=basc", "hydra/launcher has no option 'basc'"),
]


@pytest.mark.parametrize(("argument", "said"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing_behind(argument: str, said: str, tmp_path: Path) -> None:
    done = run(PYTHON, argument, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("launch.train: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_full_traceback_on_request(tmp_path: Path) -> None:
    assert "Traceback" in run(PYTHON, "comm=fusd", cwd=tmp_path, HYDRA_FULL_ERROR="1").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["comm=fusd"], "error: comm has no option 'fusd'"),
        (["comm.require_fused=true", "comm=baseline"], "error: comm.require_fused=true contradicts comm=baseline"),
        (["-m", "comm=baseline,fused"], "error: a sweep can't run inside torchrun"),
    ],
)
def test_under_torchrun_rank_0_alone_says_it_at_once(arguments: list[str], said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(TORCHRUN_OF_TWO, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert [said in line for line in done.stderr.splitlines() if line.startswith("launch.train: ")] == [True]
    assert said.removeprefix("error: ") in done.stderr.partition("Root Cause")[2]
    assert time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == []


def test_an_error_only_another_rank_has_is_said_by_it(tmp_path: Path) -> None:
    done = run(PYTHON, "data=criteo", "data.path=/not/on/this/host", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("launch.train: error (rank 1): data.path=/not/on/this/host")


def test_help_is_readable_and_printed_once(tmp_path: Path) -> None:
    done = run(PYTHON, "--help", cwd=tmp_path)
    assert done.returncode == 0
    for text in (
        "Examples",
        "Groups (group=option)",
        "trainer.steps",
        "torchrun --nproc-per-node 2",
    ):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    other = run(PYTHON, "--help", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


def test_dry_run_prints_plan_and_sizes_and_writes_nothing(tmp_path: Path) -> None:
    done = run(PYTHON, "model=dlrm_kaggle", "dry_run=true", "dry_run_ranks=3", cwd=tmp_path, fake=False)
    assert done.returncode == 0, done.stderr
    assert "batch_size: 128" in done.stdout
    assert f"{33_762_577 * 16:,} in 26 tables" in done.stdout
    assert "sharding plan of 3 ranks" in done.stdout
    assert "10,131,227" in done.stdout
    sizes = done.stdout.partition("bytes a rank")[2]
    per_rank = [line.split("│")[2].strip().replace(",", "") for line in sizes.splitlines() if line.startswith("│")]
    assert sum(map(int, per_rank)) == 33_762_577 * 16 * 4
    assert len(per_rank) == 3
    assert list(tmp_path.iterdir()) == []


def test_all_ranks_share_one_directory_with_the_resolved_config(tmp_path: Path) -> None:
    done = run(TORCHRUN_OF_TWO, "comm=baseline", "model=dlrm_kaggle", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [directory] = (tmp_path / "outputs" / "runs").iterdir()
    assert {path.name for path in directory.iterdir()} == {"config.yaml", "rank_0_of_2", "rank_1_of_2"}
    assert "${" not in (directory / "config.yaml").read_text()
    config = OmegaConf.load(directory / "config.yaml")
    assert config.run_dir == str(directory)
    assert (config.data.batch_size, config.comm.embedding_all_to_all) == (128, "baseline")


def test_a_directory_set_by_hand_is_used_as_it_is(tmp_path: Path) -> None:
    for _ in range(2):
        done = run(PYTHON, "hydra.run.dir=mine", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_that_fails_says_which_rank_and_why(tmp_path: Path) -> None:
    done = run(PYTHON, "logger.tags=[fail]", cwd=tmp_path)
    assert done.returncode == 1
    assert "launch.train: rank 0 failed: RuntimeError: asked to fail\n" in done.stderr
    assert "trained" not in done.stdout


def test_twenty_runs_started_at_once_have_twenty_directories(tmp_path: Path) -> None:
    alone = environment(RANK="0", WORLD_SIZE="1")
    started = [subprocess.Popen([*PYTHON, f"trainer.seed={n}"], cwd=tmp_path, env=alone) for n in range(20)]
    assert [process.wait(120) for process in started] == [0] * 20
    directories = list((tmp_path / "outputs" / "runs").iterdir())
    assert len(directories) == 20
    assert {OmegaConf.load(directory / "config.yaml").trainer.seed for directory in directories} == set(range(20))


def _claim_after(barrier: Any, path: Path, claimed: Any) -> None:
    barrier.wait()
    claimed.put(claim(path))


def test_twenty_claims_of_one_name_are_twenty_directories(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier, claimed = fork.Barrier(20), fork.Queue()
    processes = [fork.Process(target=_claim_after, args=(barrier, tmp_path / "a" / "run", claimed)) for _ in range(20)]
    for process in processes:
        process.start()
    assert len({claimed.get(timeout=30) for _ in processes}) == 20
    for process in processes:
        process.join()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("trained")
    arguments = ["comm=baseline", "data=random", "data.batch_size=64", "trainer.steps=4", "trainer.warmup=1"]
    done = run(TORCHRUN_OF_TWO, *arguments, "trainer.eval_batches=1", "hydra.run.dir=run", cwd=where, fake=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("run directory: ", "trained to step "))]
    assert said[0] == f"run directory: {where / 'run'}"
    assert said[1].startswith("trained to step 4: loss 0.")
    assert len(said) == 2
    return where / "run"


def test_real_training_under_torchrun_ends_well(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert (summary["status"], summary["ranks"], summary["comm"]) == ("ok", 2, "baseline")
    events = [json.loads(line)["event"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert events.count("train") == 4
