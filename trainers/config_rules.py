"""What the types of `trainers.config` cannot say: choices, ranges and pairs that make no sense together.

`check(config)` raises one `ConfigError` for the first rule broken. It needs neither a process group nor
torch, so a run with a bad config stops at once. What only one family knows is in trainers/<family>/rules.py.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from trainers import families
from trainers.config import BACKENDS, COMM_MODES, DECAYS, OPERATOR_MODES, OPTIMIZERS, ConfigError, RunConfig

CHOICES: dict[str, Sequence[str]] = {
    "comm.mode": COMM_MODES,
    "comm.embedding_all_to_all": OPERATOR_MODES,
    "comm.gemm_all_reduce": COMM_MODES,
    "comm.gemm_reduce_scatter": COMM_MODES,
    "comm.all_gather_gemm": COMM_MODES,
    "comm.backend": BACKENDS,
    "model.family": families.FAMILIES,
    "optim.name": OPTIMIZERS,
    "optim.decay": DECAYS,
    "engine.kind": ("ddp", "deepspeed"),
    "trainer.device": ("cpu", "cuda"),
    "trainer.dense_dtype": ("fp32", "bf16"),
    "trainer.compile_backend": ("inductor", "aot_eager"),
    "logger.kind": ("jsonl", "wandb"),
    "logger.wandb_mode": ("offline", "online", "disabled"),
}
AT_LEAST: dict[str, int] = {
    "data.batch_size": 1,
    "data.eval_batch_size": 1,
    "data.seed": 0,
    "optim.warmup_steps": 0,
    "optim.decay_start": 0,
    "optim.decay_steps": 0,
    "optim.accumulate": 1,
    "engine.zero_stage": 1,
    "engine.tensor_parallel": 1,
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
NOT_NEGATIVE = ("optim.eps", "optim.weight_decay", "optim.min_lr")


def check(config: RunConfig) -> None:
    """Raises `ConfigError` for the first rule `config` breaks."""
    for rule in RULES:
        _apply(rule, config)
    for rule in families.part(config.model.family, "rules").RULES:
        _apply(rule, config)


def _apply(rule: Callable[[RunConfig], str | None], config: RunConfig) -> None:
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
    problem = _not_a_choice(config, CHOICES | {"data.kind": tuple(families.data_schemas())})
    if problem:
        return problem
    family = config.model.family
    kinds = families.part(family, "config").DATA
    if config.data.kind not in kinds:
        return (
            f"data={config.data.kind} is for another family: model {config.model.name} is a {family}, which reads "
            f"data={' or '.join(kinds)}"
        )
    return _not_a_choice(config, families.part(family, "rules").CHOICES)


def _not_a_choice(config: RunConfig, choices: Mapping[str, Sequence[str]]) -> str | None:
    for key, allowed in choices.items():
        value = _value(config, key)
        if value is not None and str(value) not in allowed:
            return f"{key}={value} is not a choice (allowed: {', '.join(allowed)}){did_you_mean(str(value), allowed)}"
    return None


def _ranges(config: RunConfig) -> str | None:
    for key, least in (AT_LEAST | families.part(config.model.family, "rules").AT_LEAST).items():
        value = _value(config, key)
        if isinstance(value, int) and value < least:
            return f"{key}={value} is too small; it must be at least {least}"
    for key in POSITIVE:
        value = _value(config, key)
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            return f"{key}={value} must be positive and finite"
    for key in NOT_NEGATIVE:
        value = _value(config, key)
        if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
            return f"{key}={value} must be zero or positive, and finite"
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        return f"optim.betas={list(betas)} must be two numbers, each at least 0 and below 1"
    return None


def _fused(config: RunConfig) -> str | None:
    comm = config.comm
    if comm.require_fused:
        for operator in families.operators(config.model.family):
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
    for operator in families.operators(config.model.family):
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


def _schedule(config: RunConfig) -> str | None:
    optim = config.optim
    decay = optim.decay or ("quadratic" if optim.decay_start is not None else None)
    if decay == "quadratic" and optim.decay_steps == 0:
        return f"optim.decay_start={optim.decay_start} needs optim.decay_steps, the steps the decay takes"
    if optim.min_lr > optim.lr:
        return f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}"
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


def _engine(config: RunConfig) -> str | None:
    engine, family = config.engine, config.model.family
    if engine.kind not in families.engines(family):
        known = ", ".join(families.engines(family))
        return f"engine={engine.kind} does not train a {family}; allowed for model {config.model.name}: {known}"
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _choices,
    _ranges,
    _fused,
    _backend,
    _schedule,
    _engine,
    _resume,
    _shared_card,
)
