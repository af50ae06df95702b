"""The typed config: every key a run understands, its type, its default and the choices it allows.

Hydra composes `configs/` into these dataclasses, so an unknown key or a wrong type stops a run before any process group
exists. `trainers.config_rules.check(config)` adds what types cannot say (misspelt choices, meaningless pairs). What `model`
and `data` have beyond the keys here depends on the family: trainers/<family>/config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from trainers import families

COMM_MODES = ("fused", "baseline", "auto")  # auto: the faster of both, measured in the run
OPERATOR_MODES = (*COMM_MODES, "unfused")  # unfused: the fused backend's compute, then its exchange; to measure fusing
BACKENDS = ("auto", "host", "cuda", "triton")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw")
DECAYS = ("quadratic", "cosine")


class ConfigError(ValueError):
    """A config that cannot run; the message is one line: what is wrong, and what is allowed."""


@dataclass
class CommConfig:
    """Which collectives are fused: one switch an operator, which follows `mode` unless set."""

    mode: str = MISSING  # fused | baseline | auto
    embedding_all_to_all: str = "${.mode}"  # fused | baseline | auto | unfused
    gemm_all_reduce: str = "${.mode}"  # fused | baseline | auto; the next two are sequence parallelism's
    gemm_reduce_scatter: str = "${.mode}"
    all_gather_gemm: str = "${.mode}"
    backend: str = "auto"  # auto | host | cuda | triton
    require_fused: bool = False  # a fallback to baseline is an error
    timeout_s: float = 600.0  # bound on every wait for a peer


@dataclass
class RecipeConfig:
    """What a model was published with: defaults of `data.batch_size` and of `optim=recipe`."""

    batch_size: int = 512
    optimizer: str = "sgd"  # as optim.name
    lr: float = 0.1
    eps: float = 1e-8
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    clip_norm: float | None = None
    warmup_steps: int = 0
    decay: str | None = None
    min_lr: float = 0.0


@dataclass
class ModelConfig:
    """What a model of any family has."""

    family: str = MISSING  # dlrm | transformer
    name: str = MISSING
    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass
class DataConfig:
    """What data of any kind has."""

    kind: str = MISSING  # criteo | synthetic | random | text
    path: str | None = None
    batch_size: int = MISSING  # global batch in samples, split over replicas as evenly as it goes
    eval_batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True


@dataclass
class OptimConfig:
    name: str = "sgd"  # sgd | adagrad | rowwise_adagrad (dense parameters: adagrad) | adam | adamw
    lr: float = 0.1
    dense_lr: float | None = None  # DLRM: of all but the tables; None = lr
    eps: float = 1e-8
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # of adam and adamw
    weight_decay: float = 0.0  # adamw; of matrices alone
    warmup_steps: int = 0
    decay: str | None = None  # quadratic | cosine; None = quadratic where decay_start is set, else none
    decay_start: int | None = None  # None = the end of the warm-up, where there is a decay
    decay_steps: int = 0  # cosine: 0 = to the end of training
    min_lr: float = 0.0  # cosine: what it decays to
    in_backward: bool = True  # DLRM: tables are updated inside backward; False = plain gradients and optimizer.step()
    clip_norm: float | None = None
    accumulate: int = 1  # batches a step


@dataclass
class TrainerConfig:
    steps: int = 300
    warmup: int = 20  # steps left out of every median
    eval_every: int | None = None  # None = once, at the end
    eval_batches: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: str | None = None  # a checkpoint directory, a run directory, or "auto" (this run directory's newest)
    seed: int = 0
    dense_dtype: str = "fp32"  # fp32 | bf16
    device: str = "cpu"  # cpu | cuda
    compile: bool = False  # torch.compile of the dense part, a fused operator inside its graph
    compile_backend: str = "inductor"  # inductor | aot_eager
    ranks_per_gpu: int = 1  # ranks that share each card, in a one-GPU lab that the run sets up (docs/one-gpu-lab.md)
    deterministic: bool = False
    progress: bool = True
    profile_steps: int = 0  # write a chrome trace of that many steps after warm-up


@dataclass
class LoggerConfig:
    kind: str = "jsonl"  # jsonl | wandb (which also writes JSONL)
    project: str = "fusecomm"
    entity: str | None = None
    group: str | None = None  # the sweep's name; None = the sweep directory's name in a sweep
    wandb_mode: str = "offline"  # offline | online | disabled
    tags: list[str] = field(default_factory=list)
    every: int = 1


@dataclass
class EngineConfig:
    kind: str = "ddp"  # ddp | deepspeed
    zero_stage: int = 1  # deepspeed: 1 splits optimizer states over the replicas, 2 gradients too
    tensor_parallel: int | None = (
        None  # ranks that share one copy of a Transformer; None = all, so that there is one copy
    )
    sequence_parallel: bool = False  # between parallel layers, split activations over those ranks too
    save_gathered: bool = (
        True  # sequence parallel: keep gathered inputs for the weights' gradients; False = gather again
    )
    checkpoint_activations: bool = False  # keep each block's input alone, and run the block again in backward


@dataclass
class RunConfig:
    comm: CommConfig = field(default_factory=CommConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    dry_run: bool = False  # print config, parameter count, bytes a rank and sharding plan; train nothing
    dry_run_ranks: int | None = None  # ranks the dry run asks about; None = those started
    run_dir: str = "${hydra:runtime.output_dir}"


def register_schema() -> None:
    """Make `RunConfig` the schema that `configs/config.yaml` composes into (its `run_schema`), and those of all families
    what files in `configs/model` and `configs/data` begin with (`/schema/model/<family>`, `/schema/data/<kind>`)."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for family in families.FAMILIES:
        store.store(group="schema/model", name=family, node=families.model_schema(family))
    for kind, schema in families.data_schemas().items():
        store.store(group="schema/data", name=kind, node=schema)


def typed(values: DictConfig | dict[str, Any]) -> RunConfig:
    """The dataclasses of nested values, interpolations resolved; defaults where nothing is said.

    OmegaConf's errors for keys that the schema of that family and kind of data does not have, and for wrong types.
    ConfigError for a family that is none.
    """
    raw = OmegaConf.create(values) if isinstance(values, dict) else values
    schema = OmegaConf.structured(RunConfig)
    family = _said(raw, "model.family") or families.FAMILIES[0]
    if family not in families.FAMILIES:
        raise ConfigError(f"model.family={family} is not a choice (allowed: {', '.join(families.FAMILIES)})")
    schema.model = families.model_schema(family)
    kinds = families.data_schemas()
    kind = _said(raw, "data.kind")
    if kind in kinds:
        schema.data = kinds[kind]
    result = OmegaConf.to_object(OmegaConf.merge(schema, raw))
    assert isinstance(result, RunConfig)
    return result


def _said(raw: DictConfig, key: str) -> str | None:
    value = OmegaConf.select(raw, key, throw_on_missing=False)
    return None if value is None else str(value)
