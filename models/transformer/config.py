"""What a Transformer is: sizes and choices, nothing of how it is split or run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.parallel.vocabulary import padded_vocabulary

ACTIVATIONS = ("gelu", "swiglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of low frequencies beyond the length a model was trained at."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only Transformer, norms before the layers.

    kv_heads: None = heads. head_dim: None = width / heads. ffn: None = 4 * width.
    activation: "gelu" (GPT-2's tanh form) or "swiglu". positions: "learned" or "rope".
    bias: every linear but the output has one. vocabulary_multiple: the table's rows are padded to a multiple of it.
    init_std: of all matrices; those that write into the residual stream have init_std / sqrt(2 * layers).
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    max_length: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    activation: str = "gelu"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    positions: str = "learned"
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    tied_output: bool = True
    bias: bool = True
    vocabulary_multiple: int = 128
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for key in ("layers", "width", "heads", "vocabulary", "max_length", "vocabulary_multiple"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("kv_heads", "head_dim", "ffn"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1, or None")
        for key in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be a positive number")
        if not 0 <= self.init_std < math.inf:
            raise ValueError(f"init_std is {self.init_std}; it must not be negative")
        choices = (("activation", ACTIVATIONS), ("norm", NORMS), ("positions", POSITIONS))
        for key, allowed in choices:
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} is {getattr(self, key)!r}; allowed: {', '.join(allowed)}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by {self.heads} heads; give head_dim")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"{self.heads} heads do not divide over {self.num_kv_heads} KV heads")
        if self.positions == "rope" and self.size_of_head % 2:
            raise ValueError(f"positions=rope needs an even head_dim, got {self.size_of_head}")
        if self.rope_scaling is not None and self.positions != "rope":
            raise ValueError(f"rope_scaling means nothing with positions={self.positions}")

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.width

    def parameter_count(self, padding: bool = False) -> int:
        """Parameters of the whole model; `padding`: with the padded rows of the vocabulary."""
        head, kv = self.heads * self.size_of_head, self.num_kv_heads * self.size_of_head
        ups = 2 if self.activation == "swiglu" else 1
        rows = padded_vocabulary(self.vocabulary, self.vocabulary_multiple) if padding else self.vocabulary
        norm = self.width * (2 if self.norm == "layernorm" else 1)
        layer = self.width * (head + 2 * kv) + head * self.width + (ups + 1) * self.width * self.ffn_width + 2 * norm
        if self.bias:
            layer += head + 2 * kv + self.width + ups * self.ffn_width + self.width
        tables = rows * (1 if self.tied_output else 2) + (self.max_length if self.positions == "learned" else 0)
        return self.layers * layer + tables * self.width + norm
