"""The learning rate over steps: linear warm-up, constant, then quadratic (the reference DLRM's) or cosine decay (GPT-3's)."""

from __future__ import annotations

import math

from trainers.config import OptimConfig


def learning_rate_factor(optim: OptimConfig, step: int, steps: int) -> float:
    """What to multiply the learning rate by in step `step` (from 0) of `steps`.

    Grows linearly to 1 over `warmup_steps`. The decay begins at `decay_start` (None: at the end of the warm-up):
    quadratic   ((end - step) / decay_steps)^2 with end = decay_start + decay_steps, 0 from there on
    cosine      from lr to min_lr along half a cosine over `decay_steps` (0: to the end of training), min_lr from there on
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    kind = optim.decay or ("quadratic" if optim.decay_start is not None else None)
    start = optim.warmup_steps if optim.decay_start is None else optim.decay_start
    if kind is None or step < start:
        return 1.0
    if kind == "quadratic":
        left = start + optim.decay_steps - step
        return (left / optim.decay_steps) ** 2 if left > 0 else 0.0
    length = optim.decay_steps or max(steps - start, 1)
    done = min((step - start) / length, 1.0)
    least = optim.min_lr / optim.lr
    return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2
