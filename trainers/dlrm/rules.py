"""What the types of `trainers.dlrm.config` cannot say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainers.config import RunConfig
from trainers.dlrm.config import ClicksConfig, DLRMConfig

CRITEO_DENSE = 13
CRITEO_CATEGORIES = 26

CHOICES: dict[str, Sequence[str]] = {
    "model.interaction": ("dot", "dcnv2"),
    "model.pooling": ("sum", "mean"),
    "model.embedding_dtype": ("fp32", "fp16"),  # FBGEMM has no bf16 tables on a CPU
    "model.out_of_range": ("error", "clamp", "hash"),
}
AT_LEAST: dict[str, int] = {
    "model.num_dense": 1,
    "model.embedding_dim": 1,
    "model.dcn_layers": 1,
    "model.dcn_low_rank": 1,
    "data.num_samples": 1,
}
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def _parts(config: RunConfig) -> tuple[DLRMConfig, ClicksConfig]:
    assert isinstance(config.model, DLRMConfig)
    assert isinstance(config.data, ClicksConfig)
    return config.model, config.data


def _optimizer(config: RunConfig) -> str | None:
    optim, engine = config.optim, config.engine
    if optim.name not in OPTIMIZERS:
        return f"optim.name={optim.name} does not train tables (allowed for a DLRM: {', '.join(OPTIMIZERS)})"
    if optim.weight_decay:
        return f"optim.weight_decay={optim.weight_decay} is adamw's, and optim.name is {optim.name}"
    if engine.tensor_parallel is not None or engine.sequence_parallel or engine.checkpoint_activations:
        return "engine.tensor_parallel, sequence_parallel and checkpoint_activations are for a Transformer"
    return None


def _tables(config: RunConfig) -> str | None:
    model, _ = _parts(config)
    if not model.table_rows or min(model.table_rows) < 1:
        return "model.table_rows must list one positive number of rows for each categorical feature"
    if model.multi_hot_sizes is not None:
        if len(model.multi_hot_sizes) != len(model.table_rows):
            return (
                f"model.multi_hot_sizes has {len(model.multi_hot_sizes)} entries and model.table_rows "
                f"{len(model.table_rows)}; they must have one each for every categorical feature"
            )
        if min(model.multi_hot_sizes) < 1:
            return "model.multi_hot_sizes must be at least 1 everywhere"
    return None


def _layers(config: RunConfig) -> str | None:
    model, _ = _parts(config)
    for key, widths in (("model.bottom_mlp", model.bottom_mlp), ("model.top_mlp", model.top_mlp)):
        if not widths or min(widths) < 1:
            return f"{key}={widths} must list at least one positive width"
    if model.bottom_mlp[-1] != model.embedding_dim:
        return (
            f"model.bottom_mlp ends in {model.bottom_mlp[-1]} and model.embedding_dim is {model.embedding_dim}; they "
            f"must be equal, since {model.interaction} interacts the bottom MLP's output with the embeddings"
        )
    if model.top_mlp[-1] != 1:
        return f"model.top_mlp ends in {model.top_mlp[-1]}; it must end in 1, the click's logit"
    if len(model.top_mlp) < 2:
        return f"model.top_mlp={model.top_mlp} needs a hidden width before the final 1"
    return None


def _data(config: RunConfig) -> str | None:
    model, data = _parts(config)
    if data.kind == "criteo" and data.path is None:
        return "data=criteo needs data.path, a directory made by `python -m launch.prepare_criteo`"
    if data.kind == "criteo" and not Path(str(data.path)).is_dir():
        return f"data.path={data.path} is not a directory; `python -m launch.prepare_criteo` makes one"
    if data.kind == "random" and data.path is not None:
        return f"data.path={data.path} means nothing with data=random, which reads no files; use data=criteo"
    if data.kind != "synthetic" and data.num_samples is not None:
        return f"data.num_samples={data.num_samples} is for data=synthetic only; data={data.kind} has no use for it"
    if data.kind == "synthetic" and data.num_samples is None:
        return "data.num_samples is needed with data=synthetic"
    if data.kind == "synthetic" and model.multi_hot_sizes is not None:
        return f"data=synthetic has one id a feature, and model {model.name} takes several; use data=random or criteo"
    if data.kind != "random" and (len(model.table_rows), model.num_dense) != (CRITEO_CATEGORIES, CRITEO_DENSE):
        return (
            f"data={data.kind} has {CRITEO_DENSE} dense and {CRITEO_CATEGORIES} categorical features, and model "
            f"{model.name} takes {model.num_dense} and {len(model.table_rows)}; use data=random or another model"
        )
    return None


def _plain_gradients(config: RunConfig) -> str | None:
    optim = config.optim
    if not optim.in_backward:
        return None
    for key, used in (("clip_norm", optim.clip_norm is not None), ("accumulate", optim.accumulate > 1)):
        if used:
            return (
                f"optim.{key}={getattr(optim, key)} needs the tables' gradients, and with optim.in_backward=true the "
                f"tables are updated inside backward; set optim.in_backward=false"
            )
    return None


def _adam(config: RunConfig) -> str | None:
    optim = config.optim
    if optim.name == "adam" and optim.in_backward and config.trainer.device == "cpu":
        return (
            "optim.name=adam with optim.in_backward=true needs a GPU, as FBGEMM has no Adam on the CPU; set "
            "optim.in_backward=false or trainer.device=cuda"
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (_tables, _layers, _data, _optimizer, _plain_gradients, _adam)
