"""The typed config: every key a run understands, its type, its default and the choices it allows.

Hydra composes `configs/` into these dataclasses, so an unknown key or a wrong type stops a run before any process group
exists. `trainers.config_rules.check(config)` adds what types cannot say (misspelt choices, meaningless pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

COMM_MODES = ("fused", "baseline", "auto")  # auto: the faster of both, measured in the run
OPERATOR_MODES = (*COMM_MODES, "unfused")  # unfused: the fused backend's compute, then its exchange; to measure fusing
BACKENDS = ("auto", "host", "cuda", "triton")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass
class CommConfig:
    """Which collectives are fused. `embedding_all_to_all` is one switch an operator and follows `mode` unless set."""

    mode: str = MISSING  # fused | baseline | auto
    embedding_all_to_all: str = "${.mode}"  # fused | baseline | auto | unfused
    backend: str = "auto"  # auto | host | cuda | triton
    require_fused: bool = False  # a fallback to baseline is an error
    timeout_s: float = 600.0  # bound on every wait for a peer


@dataclass
class RecipeConfig:
    """What a model was published with: defaults of `data.batch_size` and of `optim=recipe`."""

    batch_size: int = 512
    optimizer: str = "sgd"  # sgd | adagrad | rowwise_adagrad | adam
    lr: float = 0.1
    eps: float = 1e-8


@dataclass
class ModelConfig:
    """A DLRM: 13 dense features (unless told otherwise) and one embedding table a categorical feature."""

    family: str = "dlrm"
    name: str = MISSING
    num_dense: int = 13
    embedding_dim: int = MISSING
    table_rows: list[int] = MISSING
    multi_hot_sizes: list[int] | None = None  # ids a feature; None = one each
    bottom_mlp: list[int] = MISSING  # hidden widths after the dense input; the last equals embedding_dim
    top_mlp: list[int] = MISSING  # the last is 1
    interaction: str = "dot"  # dot | dcnv2; the next two are DCNv2's
    dcn_layers: int = 3
    dcn_low_rank: int = 512
    pooling: str = "sum"  # sum | mean
    embedding_dtype: str = "fp32"  # fp32 | fp16
    out_of_range: str = "error"  # error | clamp | hash
    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass
class DataConfig:
    kind: str = MISSING  # criteo | synthetic | random
    path: str | None = None  # prepared arrays (`python -m launch.prepare_criteo`)
    batch_size: int = MISSING  # global batch, split over ranks as evenly as it goes
    eval_batch_size: int | None = None
    num_samples: int | None = None  # synthetic only
    seed: int = 0
    shuffle: bool = True


@dataclass
class OptimConfig:
    name: str = "sgd"  # sgd | adagrad | rowwise_adagrad (dense parameters: adagrad) | adam
    lr: float = 0.1
    dense_lr: float | None = None  # None = lr
    eps: float = 1e-8
    warmup_steps: int = 0
    decay_start: int | None = None
    decay_steps: int = 0
    in_backward: bool = True  # embedding optimizer inside backward; False = plain gradients and optimizer.step()
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
    kind: str = "ddp"


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
    """Make `RunConfig` the schema that `configs/config.yaml` composes into (its `run_schema`)."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="run_schema", node=RunConfig)
