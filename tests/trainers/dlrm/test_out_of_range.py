"""An index outside its table under model.out_of_range=error: the same words under every `comm`, and nothing is trained on."""

import itertools
import json
import re

import pytest

from tests.ranks import run_ranks
from tests.trainers import test_run, tiny
from trainers.checkpoint import Progress

BAD_STEP = 2


def _with_bad_index(value, rank_at_fault=0):
    def batches(data, model, split, rank, world, start):
        for number, batch in enumerate(tiny.build_batches(data, model, split, rank, world, start)):
            if number == BAD_STEP and rank == rank_at_fault:
                keys = batch.sparse.keys()
                batch.sparse.values()[batch.sparse.offset_per_key()[keys.index("cat_2")]] = value
            yield batch

    return batches


def _refusals(path):
    """(message, steps trained) of every mode; one process, since the words are what this looks at."""
    from trainers.families import make_engine

    found = []
    for comm, in_backward, value in itertools.product(["baseline", "fused"], [True, False], [-1, 120, 1 << 40]):
        config = tiny.config(path, comm, optim={"in_backward": in_backward})
        engine, progress = make_engine(config), Progress()
        with pytest.raises(ValueError, match="has index") as error:
            tiny.run_loop(config, engine, progress, _with_bad_index(value))
        found.append(((comm, in_backward), value, str(error.value), progress.step))
        engine.close()
    return found


def test_every_mode_names_feature_and_value(tmp_path):
    for mode, value, message, steps in run_ranks(1, _refusals, tmp_path)[0]:
        assert re.search(f"feature cat_2 has index {value}, its table has 120 rows", message), (mode, message)
        assert steps == BAD_STEP, mode


def _run_with_a_bad_index(config):
    test_run._run_and_leave(config, _with_bad_index(120, rank_at_fault=1))


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_the_job_ends_with_the_reason_and_saves_nothing_after(comm, tmp_path):
    config = test_run._config(tmp_path, comm, trainer={"steps": 12, "warmup": 2, "checkpoint_every": 2})
    test_run._ranks(2, _run_with_a_bad_index, config, may_die={0, 1}, timeout=40)
    reason = json.loads((tmp_path / "summary.json").read_text())["reason"]
    assert "ValueError on rank" in reason
    assert "feature cat_2 has index 120, its table has 120 rows" in reason
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
