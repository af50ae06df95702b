"""A Transformer from the command line, on the standard library's sources."""

import json

from tests.launch.commands import TORCHRUN_OF_TWO, run


def test_trains_saves_and_generates(tmp_path):
    out = tmp_path / "run"
    words = ("model=transformer_tiny", "data.length=64", "data.batch_size=4", "trainer.steps=4", "trainer.warmup=1")
    more = ("trainer.eval_batches=2", "trainer.checkpoint_every=4", "comm.require_fused=true", f"hydra.run.dir={out}")
    done = run(TORCHRUN_OF_TWO, *words, *more, cwd=tmp_path, fake=False)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["model"], summary["backend"]) == ("transformer_tiny", "host")
    assert summary["data"].startswith("text (stdlib-")
    assert (out / "checkpoints" / "step_4" / "meta.json").is_file()


def test_other_data_is_refused_in_one_line(tmp_path):
    done = run(TORCHRUN_OF_TWO, "model=gpt2", "data=random", cwd=tmp_path)
    assert done.returncode != 0
    assert (
        "launch.train: error: data=random is for another family: model gpt2 is a transformer, which reads data=text"
        in done.stderr
    )
