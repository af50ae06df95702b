"""What `model=` and `data=` have for a Transformer."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from trainers.config import DataConfig, ModelConfig

OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")
ENGINES = {
    "ddp": "trainers.transformer.ddp:DDPEngine",
    "deepspeed": "trainers.transformer.zero:DeepSpeedEngine",
}


@dataclass
class RotaryScalingConfig:
    """Llama 3.1's; see `models.transformer.config.RotaryScaling`."""

    factor: float = MISSING
    low_frequency_factor: float = MISSING
    high_frequency_factor: float = MISSING
    original_length: int = MISSING


@dataclass
class TransformerModelConfig(ModelConfig):
    """A decoder-only Transformer; the keys are those of `models.transformer.config.TransformerConfig`, which says more."""

    family: str = "transformer"
    layers: int = MISSING
    width: int = MISSING
    heads: int = MISSING
    vocabulary: int = MISSING
    max_length: int = MISSING  # tokens; with learned positions no sample can be longer
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    activation: str = "gelu"  # gelu | swiglu
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_eps: float = 1e-5
    positions: str = "learned"  # learned | rope
    rope_theta: float = 10000.0
    rope_scaling: RotaryScalingConfig | None = None
    tied_output: bool = True
    bias: bool = True
    vocabulary_multiple: int = 128
    init_std: float = 0.02
    weights: str | None = None  # a Hugging Face folder in Llama's format to start from; None = drawn from trainer.seed


@dataclass
class TextConfig(DataConfig):
    """Tokens of documents. `path`: a directory made by `python -m launch.prepare_text`, or the prefix of Megatron's
    `.bin` and `.idx`; None = the Python standard library's sources."""

    length: int = MISSING  # tokens a sample
    tokenizer: str = "byte"  # byte | bpe, of the standard library's sources
    tokenizer_vocabulary: int | None = None  # of bpe
    end_of_document: int | None = None  # Megatron files: the token; the next three are theirs too
    ends_stored: bool = False  # made with --append-eod
    shares: list[str] = field(default_factory=lambda: ["0.95", "0.05", "0"])  # of the documents: train, val, test
    split_seed: int = 0


MODEL = TransformerModelConfig
DATA = {"text": TextConfig}
