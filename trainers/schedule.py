"""The learning rate over steps, as the reference DLRM has it: linear warm-up, constant, quadratic decay."""

from __future__ import annotations

from trainers.config import OptimConfig


def learning_rate_factor(optim: OptimConfig, step: int) -> float:
    """What to multiply the learning rate by in step `step` (from 0).

    Grows linearly to 1 over `warmup_steps`; from `decay_start` on falls as ((end - step) / decay_steps)^2 with
    end = decay_start + decay_steps, and is 0 from there on. `decay_start=None` never decays.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.decay_start is None or step < optim.decay_start:
        return 1.0
    left = optim.decay_start + optim.decay_steps - step
    return (left / optim.decay_steps) ** 2 if left > 0 else 0.0
