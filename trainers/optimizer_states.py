"""Optimizer states as flat dictionaries that `torch.distributed.checkpoint` can save and load in place.

Keys are `<parameter>|<state>`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def flat(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States of the named parameters."""
    return {
        f"{name}|{key}": value for name, p in parameters.items() for key, value in optimizer.state.get(p, {}).items()
    }


def with_states(adam: torch.optim.Adam) -> torch.optim.Adam:
    """With the states that torch makes in the first step only, so that a checkpoint can be loaded before it."""
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return adam


def regroup(saved: torch.Tensor, rows: int, slices: int) -> torch.Tensor:
    """Row-wise states [m * rows] of m equal column slices as those of `slices` equal slices, [slices * rows].

    A slice's number is a mean over its columns: wider slices average what they cover, narrower ones inherit.
    """
    m = saved.numel() // rows
    saved = saved.view(m, rows)
    if slices % m == 0:
        return saved.repeat_interleave(slices // m, dim=0).reshape(-1)
    if m % slices == 0:
        return saved.view(slices, m // slices, rows).mean(dim=1).reshape(-1)
    fine = saved.repeat_interleave(slices, dim=0)  # m * slices slices
    return fine.view(slices, m, rows).mean(dim=1).reshape(-1)
