"""Published Mixture-of-Experts layers: routing and FFN."""

from __future__ import annotations

from models.moe.config import MoEConfig

PRESETS = {
    "tiny": MoEConfig(num_experts=8, top_k=2, ffn=128, renormalize="chosen", aux_loss=0.01, z_loss=1e-3),
    # Switch-Base (arXiv 2101.03961), with GELU in place of its ReLU.
    "switch": MoEConfig(
        num_experts=128,
        top_k=1,
        ffn=3072,
        activation="gelu",
        drop="position",
        capacity_factor=1.25,
        aux_loss=0.01,
    ),
    # arXiv 2006.16668, with GELU in place of its ReLU; its random dropping of weak second choices is left out.
    # Twice what an even load needs; where "capacity 2" is read as 2 * tokens / experts, the factor is 1.
    "gshard": MoEConfig(
        num_experts=2048,
        top_k=2,
        ffn=8192,
        activation="gelu",
        renormalize="chosen",
        drop="choice",
        capacity_factor=2.0,
        aux_loss=0.01,
        balance_over="first",
    ),
    "mixtral_8x7b": MoEConfig(num_experts=8, top_k=2, ffn=14336, renormalize="chosen", aux_loss=0.02),
    # arXiv 2401.06066
    "deepseek_moe_16b": MoEConfig(num_experts=64, top_k=6, ffn=1408, shared_experts=2, aux_loss=1e-3),
    # arXiv 2405.04434; of its three balance losses, the one over experts.
    "deepseek_v2": MoEConfig(
        num_experts=160,
        top_k=6,
        ffn=1536,
        shared_experts=2,
        scaling=16.0,
        n_groups=8,
        topk_groups=3,
        aux_loss=3e-3,
    ),
    # arXiv 2412.19437; without its balance loss within a sequence (1e-4).
    "deepseek_v3": MoEConfig(
        num_experts=256,
        top_k=8,
        ffn=2048,
        shared_experts=1,
        score="sigmoid",
        renormalize="chosen",
        scaling=2.5,
        n_groups=8,
        topk_groups=4,
        group_score="sum_of_two",
        bias_rate=1e-3,
    ),
}
