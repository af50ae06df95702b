"""What a Mixture-of-Experts layer is: how tokens choose experts, what is dropped, which losses balance it, the FFN's sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

ACTIVATIONS = ("gelu", "swiglu")
SCORES = ("softmax", "sigmoid")
RENORMALIZE = ("none", "chosen", "kept")
GROUP_SCORES = ("max", "sum_of_two")
DROP = ("none", "probability", "position", "choice")
BALANCE_OVER = ("all", "first")


@dataclass(frozen=True)
class MoEConfig:
    """An MoE layer in place of a Transformer's FFN.

    ffn: hidden width of one expert. shared_experts: as many more experts of that width, which every token goes through.
    score: of an expert for a token, from all of its logits ("softmax") or one ("sigmoid").
    renormalize: a token's gates are divided by their sum: "none"; "chosen", over its top_k; "kept", over those that capacity
        leaves it, as DeepSpeed does.
    scaling: gates are multiplied by it.
    n_groups, topk_groups: experts lie in n_groups groups of equal size, and a token chooses within its best topk_groups
        (DeepSeek-V2). group_score: a group is as good as its best expert, "max" (V2), or its two best together,
        "sum_of_two" (V3).
    bias_rate: step of the bias that balances the choice (DeepSeek-V3); None = no bias.
    drop: "none" (dropless), or what a full expert keeps: the rows of highest "probability", of lowest "position", or
        all first choices before any second one ("choice", GShard).
    capacity_factor, min_capacity: see `capacity.capacity`; min_capacity means nothing without the former.
    aux_loss, balance_over, z_loss: see `losses`; coefficients, 0 = off.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_experts: int = 0
    activation: str = "swiglu"
    score: str = "softmax"
    renormalize: str = "none"
    scaling: float = 1.0
    n_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    bias_rate: float | None = None
    drop: str = "none"
    capacity_factor: float | None = None
    min_capacity: int = 8
    aux_loss: float = 0.0
    balance_over: str = "all"
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        self._check_values()
        self._check_groups()
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}; there are only {self.num_experts} experts")
        if self.top_k == 1 and self.renormalize != "none":
            raise ValueError(f"renormalize={self.renormalize} with top_k=1 makes every gate 1, which teaches nothing")
        if self.drop == "none" and self.capacity_factor is not None:
            raise ValueError(f"capacity_factor {self.capacity_factor} means nothing with drop=none (dropless)")
        if self.drop != "none" and self.capacity_factor is None:
            raise ValueError(f"drop={self.drop} needs a capacity_factor")
        if self.drop == "none" and self.renormalize == "kept":
            raise ValueError("renormalize=kept means nothing with drop=none, which keeps all; use chosen")
        if self.aux_loss == 0 and self.balance_over != "all":
            raise ValueError(f"balance_over={self.balance_over} means nothing with aux_loss=0")

    def _check_values(self) -> None:
        for key in ("num_experts", "top_k", "ffn", "n_groups", "topk_groups"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("shared_experts", "min_capacity"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} is {getattr(self, key)}; it must not be negative")
        for key in ("aux_loss", "z_loss"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise ValueError(f"{key} is {getattr(self, key)}; it must be 0 or a positive number")
        for key in ("scaling", "bias_rate", "capacity_factor"):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{key} is {value}; it must be a positive number")
        choices = (
            ("activation", ACTIVATIONS),
            ("score", SCORES),
            ("renormalize", RENORMALIZE),
            ("group_score", GROUP_SCORES),
            ("drop", DROP),
            ("balance_over", BALANCE_OVER),
        )
        for key, allowed in choices:
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} is {getattr(self, key)!r}; allowed: {', '.join(allowed)}")

    def _check_groups(self) -> None:
        if self.num_experts % self.n_groups:
            raise ValueError(f"{self.num_experts} experts do not divide over {self.n_groups} groups")
        if self.topk_groups > self.n_groups:
            raise ValueError(f"topk_groups is {self.topk_groups}; there are only {self.n_groups} groups")
        within = self.topk_groups * self.group_size
        if self.top_k > within and self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}; {self.topk_groups} groups have only {within} experts")
        if self.group_score == "sum_of_two" and self.n_groups == 1:
            raise ValueError("group_score=sum_of_two means nothing with n_groups=1")
        if self.group_score == "sum_of_two" and self.group_size < 2:
            raise ValueError("group_score=sum_of_two needs groups of at least 2 experts")

    @property
    def group_size(self) -> int:
        return self.num_experts // self.n_groups
