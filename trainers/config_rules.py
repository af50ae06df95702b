"""What the types of `trainers.config` cannot say: choices, ranges and pairs that make no sense together.

`check(config)` raises one `ConfigError` for the first rule broken. It needs neither a process group nor
torch, so a run with a bad config stops at once.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainers.config import BACKENDS, COMM_MODES, OPERATOR_MODES, OPTIMIZERS, RunConfig

CRITEO_DENSE = 13
CRITEO_CATEGORIES = 26
FUSED_OPERATORS = ("embedding_all_to_all",)

CHOICES: dict[str, Sequence[str]] = {
    "comm.mode": COMM_MODES,
    "comm.embedding_all_to_all": OPERATOR_MODES,
    "comm.backend": BACKENDS,
    "model.family": ("dlrm",),
    "model.interaction": ("dot", "dcnv2"),
    "model.pooling": ("sum", "mean"),
    "model.embedding_dtype": ("fp32", "fp16"),  # FBGEMM has no bf16 tables on a CPU
    "model.out_of_range": ("error", "clamp", "hash"),
    "data.kind": ("criteo", "synthetic", "random"),
    "optim.name": OPTIMIZERS,
    "engine.kind": ("ddp",),
    "trainer.device": ("cpu", "cuda"),
    "trainer.dense_dtype": ("fp32", "bf16"),
    "trainer.compile_backend": ("inductor", "aot_eager"),
    "logger.kind": ("jsonl", "wandb"),
    "logger.wandb_mode": ("offline", "online", "disabled"),
}
AT_LEAST: dict[str, int] = {
    "model.num_dense": 1,
    "model.embedding_dim": 1,
    "model.dcn_layers": 1,
    "model.dcn_low_rank": 1,
    "data.batch_size": 1,
    "data.eval_batch_size": 1,
    "data.num_samples": 1,
    "data.seed": 0,
    "optim.warmup_steps": 0,
    "optim.decay_start": 0,
    "optim.decay_steps": 0,
    "optim.accumulate": 1,
    "trainer.steps": 1,
    "trainer.warmup": 0,
    "trainer.eval_every": 1,
    "trainer.eval_batches": 1,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 1,
    "trainer.seed": 0,
    "trainer.ranks_per_gpu": 1,
    "trainer.profile_steps": 0,
    "logger.every": 1,
    "dry_run_ranks": 1,
}
POSITIVE = ("comm.timeout_s", "optim.lr", "optim.dense_lr", "optim.clip_norm")


class ConfigError(ValueError):
    """A config that cannot run; the message is one line: what is wrong, and what is allowed."""


def check(config: RunConfig) -> None:
    """Raises `ConfigError` for the first rule `config` breaks."""
    for rule in RULES:
        problem = rule(config)
        if problem:
            raise ConfigError(problem)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or an empty string where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _choices(config: RunConfig) -> str | None:
    for key, allowed in CHOICES.items():
        value = str(_value(config, key))
        if value not in allowed:
            return f"{key}={value} is not a choice (allowed: {', '.join(allowed)}){did_you_mean(value, allowed)}"
    return None


def _ranges(config: RunConfig) -> str | None:
    for key, least in AT_LEAST.items():
        value = _value(config, key)
        if isinstance(value, int) and value < least:
            return f"{key}={value} is too small; it must be at least {least}"
    for key in POSITIVE:
        value = _value(config, key)
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            return f"{key}={value} must be positive and finite"
    if not (config.optim.eps >= 0 and math.isfinite(config.optim.eps)):
        return f"optim.eps={config.optim.eps} must be zero or positive, and finite"
    return None


def _tables(config: RunConfig) -> str | None:
    model = config.model
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
    model = config.model
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
    data, model = config.data, config.model
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


def _fused(config: RunConfig) -> str | None:
    comm = config.comm
    if comm.require_fused:
        for operator in FUSED_OPERATORS:
            if getattr(comm, operator) != "fused":
                why = f"comm.{operator}={getattr(comm, operator)}" if comm.mode == "fused" else f"comm={comm.mode}"
                return f"comm.require_fused=true contradicts {why}; drop one of them"
    return None


def _backend(config: RunConfig) -> str | None:
    comm, device = config.comm, config.trainer.device
    if comm.backend == "host" and device == "cuda":
        return "comm.backend=host works on CPU tensors, and trainer.device is cuda; use comm.backend=cuda or auto"
    if comm.backend in ("cuda", "triton") and device == "cpu":
        return f"comm.backend={comm.backend} works on a GPU, and trainer.device is cpu; use comm.backend=host or auto"
    for operator in FUSED_OPERATORS:
        if getattr(comm, operator) == "auto" and comm.backend != "auto":
            return (
                f"comm.backend={comm.backend} contradicts comm.{operator}=auto, which measures every backend of the device; "
                "drop one of them"
            )
        if getattr(comm, operator) != "fused" or comm.backend == "auto":
            continue
        existing = implemented_backends(operator)
        if comm.backend not in existing:
            return f"comm.backend={comm.backend} has no {operator}; there are: {', '.join(existing)}, or auto to choose"
    return None


def implemented_backends(operator: str) -> list[str]:
    """Fused backends that have a file for `operator` (found without importing torch)."""
    spec = importlib.util.find_spec("fused_ops")
    roots = spec.submodule_search_locations if spec is not None else None
    files = [path for root in roots or () for path in Path(root).glob(f"backends/*/{operator}.py")]
    return sorted({path.parent.name for path in files} - {"baseline", "unfused"})


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


def _schedule(config: RunConfig) -> str | None:
    optim = config.optim
    if optim.decay_start is not None and optim.decay_steps == 0:
        return f"optim.decay_start={optim.decay_start} needs optim.decay_steps, the steps the decay takes"
    if optim.decay_start is not None and optim.decay_start < optim.warmup_steps:
        return f"optim.decay_start={optim.decay_start} comes before the end of optim.warmup_steps={optim.warmup_steps}"
    return None


def _resume(config: RunConfig) -> str | None:
    resume = config.trainer.resume
    if resume is not None and resume != "auto" and not Path(resume).is_dir():
        return f"trainer.resume={resume} is not a directory; give a checkpoint, a run directory, or auto"
    return None


def _shared_card(config: RunConfig) -> str | None:
    trainer = config.trainer
    if trainer.ranks_per_gpu > 1 and trainer.device == "cpu":
        return f"trainer.ranks_per_gpu={trainer.ranks_per_gpu} is about GPUs, and trainer.device is cpu; set trainer.device=cuda"
    return None


def _adam(config: RunConfig) -> str | None:
    optim = config.optim
    if optim.name == "adam" and optim.in_backward and config.trainer.device == "cpu":
        return (
            "optim.name=adam with optim.in_backward=true needs a GPU, as FBGEMM has no Adam on the CPU; set "
            "optim.in_backward=false or trainer.device=cuda"
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _choices,
    _ranges,
    _tables,
    _layers,
    _data,
    _fused,
    _backend,
    _plain_gradients,
    _schedule,
    _resume,
    _shared_card,
    _adam,
)
