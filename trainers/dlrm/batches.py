"""From a run's config to its batches of clicks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from trainers.data.arrays import Dataset
from trainers.data.batch import Batch
from trainers.data.criteo import CriteoBatches
from trainers.data.errors import DataError
from trainers.data.info import DataInfo
from trainers.data.layout import NUM_DENSE, NUM_SPARSE
from trainers.data.random_batches import RandomBatches
from trainers.data.synthetic import synthetic_directory
from trainers.dlrm.config import ClicksConfig, DLRMConfig

RANDOM_EVAL_BATCHES = 16


class Batches(Protocol):
    """Iterable over this rank's parts of the global batches, from `start_step` on."""

    start_step: int

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def max_ids(self) -> list[int] | None: ...


def build_batches(
    data: ClicksConfig, model: DLRMConfig, split: str, rank: int = 0, world: int = 1, start_step: int = 0
) -> Batches:
    """Batches of `split` (train: endless; val, test: once through) for rank `rank` of `world`.

    Ids are checked against `model.table_rows` where `model.out_of_range` is error. DataError: see `CriteoBatches`.
    """
    batch_size = data.batch_size if split == "train" else data.eval_batch_size or data.batch_size
    if data.kind == "random":
        return RandomBatches(
            list(model.table_rows),
            batch_size,
            num_dense=model.num_dense,
            multi_hot_sizes=None if model.multi_hot_sizes is None else list(model.multi_hot_sizes),
            split=split,
            rank=rank,
            world=world,
            seed=data.seed,
            start_step=start_step,
            num_samples=None if split == "train" else RANDOM_EVAL_BATCHES * batch_size,
        )
    directory = _directory(data, model)
    batches = CriteoBatches(
        directory,
        split,
        batch_size,
        rank=rank,
        world=world,
        seed=data.seed,
        shuffle=data.shuffle and split == "train",
        start_step=start_step,
        epochs=None if split == "train" else 1,
        multi_hot=model.multi_hot_sizes is not None,
        table_rows=list(model.table_rows) if model.out_of_range == "error" else None,
    )
    if model.multi_hot_sizes is not None and list(model.multi_hot_sizes) != batches.data.hot_sizes:
        raise DataError(
            f"{directory}: ids a feature are {batches.data.hot_sizes}, "
            f"model.multi_hot_sizes is {list(model.multi_hot_sizes)}"
        )
    return batches


def data_info(data: ClicksConfig, model: DLRMConfig) -> DataInfo:
    """What `build_batches` with this config reads. Makes synthetic data if it is not there yet."""
    if data.kind == "random":
        samples: dict[str, int | None] = {"train": None}
        samples |= dict.fromkeys(("val", "test"), RANDOM_EVAL_BATCHES * (data.eval_batch_size or data.batch_size))
        return DataInfo("random", True, samples, 0.5, [rows - 1 for rows in model.table_rows])
    directory = _directory(data, model)
    dataset = Dataset(directory, model.multi_hot_sizes is not None)
    meta = dataset.meta
    return DataInfo(
        name=f"{data.kind} ({directory.name})",
        synthetic=data.kind == "synthetic" or (meta is not None and meta.synthetic),
        bayes_auc=None if meta is None else meta.bayes_auc,
        samples=dict(dataset.split_samples()),
        max_ids=None if meta is None else meta.max_ids,
    )


def _directory(data: ClicksConfig, model: DLRMConfig) -> Path:
    if model.num_dense != NUM_DENSE or len(model.table_rows) != NUM_SPARSE:
        raise DataError(
            f"data={data.kind} has {NUM_DENSE} dense and {NUM_SPARSE} categorical features, model {model.name} takes "
            f"{model.num_dense} and {len(model.table_rows)}; data=random fits any model"
        )
    if data.kind == "criteo":
        if data.path is None:
            raise DataError(
                "data.path is needed with data=criteo: a directory made by `python -m launch.prepare_criteo`"
            )
        return Path(data.path)
    if data.kind != "synthetic":
        raise DataError(f"data.kind {data.kind!r}, allowed are criteo, synthetic and random")
    if data.num_samples is None:
        raise DataError("data.num_samples is needed with data=synthetic")
    if model.multi_hot_sizes is not None:
        raise DataError(
            "synthetic data has one id a feature, but model.multi_hot_sizes is set; use data=random or criteo"
        )
    return synthetic_directory(data.num_samples, data.seed, list(model.table_rows), data.path)
