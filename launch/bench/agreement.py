"""Every variant is called once before any is timed: what cannot run, or gives another result than baseline, is left out.

A transport that moves no data looks like a fast one, so no forward is timed whose output is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from launch.bench.variants import Variant

# Sums of the same products in another order; half precisions then round to their last bit.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Rehearsal:
    """Collective. `able`: the variants to time. `problems`: (backend, phase, why) of the others, alike on every rank."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.able: list[Variant] = []
        self.problems: list[tuple[str, str, str]] = []
        wrong: set[str] = set()
        reference: torch.Tensor | None = None
        # Forwards first: the others may change the tables.
        for variant in sorted(variants, key=lambda v: v.phase != "forward"):
            if variant.backend in wrong:
                continue
            output, problem = _call(variant)
            if variant.phase == "forward" and problem is None and output is not None:
                if reference is None:
                    reference = output.clone()
                problem = difference(output, reference)
            problem = _agreed(problem)
            if problem is None:
                self.able.append(variant)
                continue
            self.problems.append((variant.backend, variant.phase, problem))
            if variant.phase == "forward":
                wrong.add(variant.backend)


def difference(output: torch.Tensor, reference: torch.Tensor) -> str | None:
    """What tells `output` from the first backend's, beyond rounding; None where nothing does."""
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return f"gives {output.dtype} {list(output.shape)}, the first backend {reference.dtype} {list(reference.shape)}"
    if output.numel() == 0:
        return None
    furthest = (output - reference).abs().max().item()
    largest = reference.abs().max().item()
    if furthest <= TOLERANCE[reference.dtype] * largest:  # false for NaN
        return None
    return f"gives another result than the first backend: up to {furthest:.3g} off where values reach {largest:.3g}"


def _call(variant: Variant) -> tuple[torch.Tensor | None, str | None]:
    try:
        output = variant.run(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return output if isinstance(output, torch.Tensor) else None, None


def _agreed(problem: str | None) -> str | None:
    """The first rank's problem, on every rank."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((f"rank {r}: {text}" for r, text in enumerate(problems) if text is not None), None)
