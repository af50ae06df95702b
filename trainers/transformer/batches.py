"""From a run's config to its batches of text."""

from __future__ import annotations

from pathlib import Path

from trainers.data.errors import DataError
from trainers.data.info import DataInfo
from trainers.data.text.batches import TextBatches
from trainers.data.text.build import (
    TextData,
    build_text_batches,
    is_megatron_prefix,
    open_megatron,
    open_text,
    standard_library_directory,
)
from trainers.transformer.config import TextConfig, TransformerModelConfig


def build_batches(
    data: TextConfig, model: TransformerModelConfig, split: str, rank: int = 0, world: int = 1, start_step: int = 0
) -> TextBatches:
    """Batches of `split` (train: endless; val, test: once through) for replica `rank` of `world`.

    Tokens are checked against the model's vocabulary. DataError: see `build_text_batches`.
    """
    return build_text_batches(
        _open(data),
        split,
        data.batch_size if split == "train" else data.eval_batch_size or data.batch_size,
        data.length,
        vocabulary=model.vocabulary,
        rank=rank,
        world=world,
        seed=data.seed,
        shuffle=data.shuffle,
        start_step=start_step,
    )


def data_info(data: TextConfig, model: TransformerModelConfig) -> DataInfo:
    """What `build_batches` with this config reads. Tokenizes the standard library's sources if that was not done yet."""
    opened = _open(data)
    samples: dict[str, int | None] = {"train": None}
    samples |= {split: -(-tokens // data.length) for split, tokens in opened.split_tokens().items() if split != "train"}
    return DataInfo(f"text ({opened.name})", False, samples)


def _open(data: TextConfig) -> TextData:
    if data.path is None:
        return open_text(standard_library_directory(data.tokenizer, data.tokenizer_vocabulary))
    if not is_megatron_prefix(data.path):
        return open_text(Path(data.path))
    if data.end_of_document is None:
        raise DataError(
            f"{data.path}: Megatron's files do not say their end-of-document token; data.end_of_document must"
        )
    return open_megatron(
        data.path,
        data.end_of_document,
        ends_stored=data.ends_stored,
        shares=list(data.shares),
        split_seed=data.split_seed,
    )
