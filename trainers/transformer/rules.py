"""What the types of `trainers.transformer.config` cannot say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from models.transformer.config import ACTIVATIONS, NORMS, POSITIONS
from trainers.config import RunConfig
from trainers.transformer.architecture import architecture
from trainers.transformer.config import TextConfig, TransformerModelConfig

CHOICES: dict[str, Sequence[str]] = {
    "model.activation": ACTIVATIONS,
    "model.norm": NORMS,
    "model.positions": POSITIONS,
    "data.tokenizer": ("byte", "bpe"),
}
AT_LEAST: dict[str, int] = {
    "data.length": 1,
    "data.tokenizer_vocabulary": 257,
    "data.end_of_document": 0,
    "data.split_seed": 0,
}
OPTIMIZERS = ("sgd", "adam", "adamw")
ZERO_STAGES = (1, 2)


def _parts(config: RunConfig) -> tuple[TransformerModelConfig, TextConfig]:
    assert isinstance(config.model, TransformerModelConfig)
    assert isinstance(config.data, TextConfig)
    return config.model, config.data


def _architecture(config: RunConfig) -> str | None:
    try:
        architecture(_parts(config)[0])
    except ValueError as error:
        return f"model {config.model.name}: {error}"
    return None


def _data(config: RunConfig) -> str | None:
    model, data = _parts(config)
    if model.positions == "learned" and data.length > model.max_length:
        return f"data.length={data.length}, and model {model.name} has model.max_length={model.max_length} learned positions"
    if data.path is not None and not _is_text(data.path):
        return (
            f"data.path={data.path} is neither a directory made by `python -m launch.prepare_text` nor the prefix of "
            "Megatron's .bin and .idx"
        )
    if data.path is not None and not Path(data.path).is_dir() and data.end_of_document is None:
        return (
            f"data.path={data.path} are Megatron's files, which do not say how documents end: set data.end_of_document"
        )
    if data.tokenizer_vocabulary is not None and data.tokenizer != "bpe":
        return f"data.tokenizer_vocabulary={data.tokenizer_vocabulary} is for data.tokenizer=bpe"
    return None


def _is_text(path: str) -> bool:
    return Path(path).is_dir() or Path(f"{path}.idx").is_file()


def _weights(config: RunConfig) -> str | None:
    model, _ = _parts(config)
    if model.weights is not None and not (Path(model.weights) / "config.json").is_file():
        return f"model.weights={model.weights} has no config.json; a Hugging Face folder in Llama's format is needed"
    return None


def _optimizer(config: RunConfig) -> str | None:
    optim = config.optim
    if optim.name not in OPTIMIZERS:
        return f"optim.name={optim.name} does not train a Transformer (allowed: {', '.join(OPTIMIZERS)})"
    if optim.weight_decay and optim.name != "adamw":
        return f"optim.weight_decay={optim.weight_decay} is adamw's, and optim.name is {optim.name}"
    if optim.dense_lr is not None:
        return f"optim.dense_lr={optim.dense_lr} is for a DLRM, whose tables have optim.lr"
    return None


def _engine(config: RunConfig) -> str | None:
    engine, model = config.engine, _parts(config)[0]
    if engine.zero_stage not in ZERO_STAGES:
        return f"engine.zero_stage={engine.zero_stage} is not a choice (allowed: 1, 2)"
    kv_heads = model.kv_heads or model.heads
    if engine.tensor_parallel is not None and engine.tensor_parallel > kv_heads:
        return f"engine.tensor_parallel={engine.tensor_parallel}: model {model.name} has {kv_heads} KV heads to split"
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (_architecture, _data, _weights, _optimizer, _engine)
