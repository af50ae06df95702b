"""`launch.train comm=auto` as users start it: one run that measures, one that remembers, and what they say of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fused_ops.compiler import build_host_library
from launch.page.comparison import compare
from launch.page.runs import find_runs
from tests.launch.commands import TORCHRUN_OF_TWO, run

SMALL = ("data=random", "data.batch_size=64", "trainer.steps=5", "trainer.warmup=1", "trainer.eval_batches=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    where = tmp_path_factory.mktemp("auto")
    cache = where / "cache" / "fused_ops"
    cache.mkdir(parents=True)
    shutil.copy(build_host_library(), cache)  # so that the runs need not compile it
    options = {"cwd": where, "fake": False, "XDG_CACHE_HOME": str(where / "cache")}
    done = [
        run(TORCHRUN_OF_TWO, "comm=auto", f"hydra.run.dir={name}", *SMALL, **options) for name in ("first", "second")
    ]
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    return where, done


def test_one_line_a_decision_on_rank_0_and_a_later_run_remembers(runs):
    _, done = runs
    for process, source in zip(done, ("measured", "from the cache"), strict=True):
        said = [line for line in process.stderr.splitlines() if "auto: embedding_all_to_all [2^6 samples," in line]
        assert len(said) == 1
        assert said[0].endswith(f"({source})")


def test_the_summary_says_what_ran_and_why(runs):
    where, _ = runs
    summaries = [json.loads((where / name / "summary.json").read_text()) for name in ("first", "second")]
    for summary in summaries:
        assert summary["comm"] == "auto"
        assert summary["backend"] in ("host", "baseline")
        ran = {row["operator"]: row for row in summary["counters"] if row["reason"].startswith("auto: ")}
        assert {row["backend"] for row in ran.values()} == {summary["backend"]}, "backward runs where forward ran"
        assert ran["embedding_all_to_all"]["calls"] >= 5
        assert ran["embedding_all_to_all_gradient"]["calls"] == ran["embedding_all_to_all_update"]["calls"] == 5
    assert summaries[0]["backend"] == summaries[1]["backend"]


def test_the_page_shows_the_backend_of_an_auto_run_and_has_no_warning_for_it(runs):
    where, _ = runs
    comparison = compare(find_runs([where / "first", where / "second"]))
    assert [row.label for row in comparison.rows] == ["auto (first)", "auto (second)"]
    assert {row.run["backend"] for row in comparison.rows} <= {"host", "baseline"}
    assert not [warning for warning in comparison.warnings if "fused was asked for" in warning]
