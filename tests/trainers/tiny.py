"""A model, a configuration and click data small enough for tests; every global batch is the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainers import loop
from trainers.checkpoint import Progress
from trainers.config import RunConfig, typed
from trainers.data.batch import Batch, cat_keys
from trainers.dlrm.config import ClicksConfig, DLRMConfig
from trainers.engine import Engine
from trainers.families import make_engine

ROWS = [50, 3, 120, 40, 7]
HOT = [1, 2, 4, 1, 3]
NUM_DENSE = 4


def config(run_dir: Any, comm: str = "baseline", **groups: dict[str, Any]) -> RunConfig:
    """`groups` overrides: config(tmp, optim={"lr": 0.1}, trainer={"steps": 5})."""
    base: dict[str, dict[str, Any]] = {
        "comm": {"mode": comm, "embedding_all_to_all": comm, "timeout_s": 60.0},
        "model": {
            "family": "dlrm",
            "name": "tiny",
            "num_dense": NUM_DENSE,
            "embedding_dim": 16,
            "table_rows": ROWS,
            "multi_hot_sizes": HOT,
            "bottom_mlp": [32, 16],
            "top_mlp": [16, 1],
        },
        "data": {"kind": "random", "batch_size": 24, "num_samples": 480},
        "optim": {"lr": 0.5},
        "trainer": {"steps": 20, "warmup": 2, "progress": False},
    }
    for group, keys in groups.items():
        base[group] = base.get(group, {}) | keys
    return typed(base | {"run_dir": str(run_dir)})  # type: ignore[arg-type]


def global_batch(model: DLRMConfig, number: int, size: int, split: str = "train") -> Batch:
    """Bags of 0 to `multi_hot_sizes` ids; the label leans on the dense features and on the parity of table 0's id."""
    generator = torch.Generator().manual_seed(number + (1 << 20) * (split != "train"))
    dense = torch.randn(size, model.num_dense, generator=generator)
    hot = model.multi_hot_sizes or [1] * len(model.table_rows)
    values, lengths = [], []
    for rows, most in zip(model.table_rows, hot, strict=True):
        length = torch.randint(0 if most > 1 else 1, most + 1, (size,), generator=generator).int()
        lengths.append(length)
        values.append(torch.randint(0, rows, (int(length.sum()),), generator=generator))
    score = dense.sum(1) + 2.0 * (values[0] % 2) - 1.0 if hot[0] == 1 else dense.sum(1)
    labels = (torch.rand(size, generator=generator) < score.sigmoid()).float()
    sparse = KeyedJaggedTensor(keys=cat_keys(len(hot)), values=torch.cat(values), lengths=torch.cat(lengths))
    return Batch(dense, sparse, labels)


def part(batch: Batch, first: int, last: int) -> Batch:
    """Samples [first, last) of a batch."""
    keys = batch.sparse.keys()
    jagged = [batch.sparse[key] for key in keys]
    values = [j.values()[int(j.offsets()[first]) : int(j.offsets()[last])] for j in jagged]
    lengths = [j.lengths()[first:last] for j in jagged]
    sparse = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
    return Batch(batch.dense[first:last], sparse, batch.labels[first:last])


def build_batches(
    data: ClicksConfig, model: DLRMConfig, split: str, rank: int, world: int, start_step: int = 0
) -> Iterator[Batch]:
    """`num_samples` samples in global batches, split as evenly as they go; the last may be partial."""
    samples, size = data.num_samples or 1 << 30, data.batch_size
    for number in range(start_step, -(-samples // size)):
        here = min(size, samples - number * size)
        whole = global_batch(model, number, here, split)
        yield part(whole, here * rank // world, here * (rank + 1) // world)


def train(config: RunConfig, progress: Progress | None = None) -> list[dict[str, Any]]:
    """This rank's records of a run on the process group that is there."""
    engine = make_engine(config)
    records = run_loop(config, engine, progress or Progress())
    engine.close()
    return records


def run_loop(
    config: RunConfig, engine: Engine, progress: Progress, batches: Any = build_batches
) -> list[dict[str, Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    records: list[dict[str, Any]] = []

    def part_of(split: str, start: int) -> Iterator[Batch]:
        return iter(batches(config.data, config.model, split, rank, world, start))

    loop.train(loop.Run(config, engine, part_of, records.append, progress))
    return records


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["event"] == "train"]


def train_all(configs: list[RunConfig]) -> list[list[dict[str, Any]]]:
    """Several runs, one after the other, in the same processes."""
    return [train(config) for config in configs]
