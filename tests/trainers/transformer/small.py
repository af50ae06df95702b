"""A Transformer, a configuration and a text small enough for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.trainers import tiny
from trainers.checkpoint import Progress
from trainers.config import RunConfig, typed
from trainers.data.text.prepare import TextOptions, prepare_text
from trainers.families import make_engine
from trainers.transformer.batches import build_batches

LENGTH = 24


def make_text(directory: Path) -> Path:
    """Prepared documents of made-up words, which a model can learn something of."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    source = directory / "source"
    source.mkdir(parents=True)
    for number in range(60):
        (source / f"{number}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(3, 80))))
    prepare_text([source], directory / "text", TextOptions(shares=["0.8", "0.2", "0"]))
    return directory / "text"


def config(path: Path, text: Path, comm: str = "baseline", **groups: dict[str, Any]) -> RunConfig:
    """`groups` overrides: config(tmp, text, optim={"lr": 0.1}, engine={"tensor_parallel": 2})."""
    operators = dict.fromkeys(("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm"), comm)
    base: dict[str, dict[str, Any]] = {
        "comm": {"mode": comm, **operators, "embedding_all_to_all": comm, "timeout_s": 60.0},
        "model": {
            "family": "transformer",
            "name": "small",
            "layers": 2,
            "width": 32,
            "heads": 4,
            "vocabulary": 257,
            "max_length": LENGTH,
            "vocabulary_multiple": 4,
        },
        "data": {"kind": "text", "path": str(text), "batch_size": 6, "length": LENGTH},
        "optim": {
            "name": "adamw",
            "lr": 0.01,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "warmup_steps": 3,
            "decay": "cosine",
        },
        "trainer": {"steps": 12, "warmup": 2, "progress": False},
    }
    for group, keys in groups.items():
        base.setdefault(group, {}).update(keys)
    return typed(base | {"run_dir": str(path)})  # type: ignore[arg-type]


def train(config: RunConfig, progress: Progress | None = None) -> list[dict[str, Any]]:
    """This rank's records of a run on the process group that is there."""
    engine = make_engine(config)

    def batches(data: Any, model: Any, split: str, rank: int, world: int, start: int) -> Iterator[Any]:
        replica = engine.replica
        return iter(build_batches(data, model, split, replica.rank, replica.count, start))

    records = tiny.run_loop(config, engine, progress or Progress(), batches)
    engine.close()
    return records


def train_all(configs: list[RunConfig]) -> list[list[dict[str, Any]]]:
    """Several runs, one after the other, in the same processes."""
    return [train(config) for config in configs]


def losses(records: list[dict[str, Any]]) -> list[float]:
    """Of every step, and of the evaluation at the end."""
    return [record["loss"] for record in records]
