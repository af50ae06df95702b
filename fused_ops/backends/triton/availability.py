"""Whether the Triton backend can serve a group, asked without importing Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from fused_ops.symmetric.cuda_memory import why_unavailable as why_cuda_unavailable
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.triton_layout import MAX_RANKS


def device_type() -> str:
    """Of the tensors that the backend takes: Triton's interpreter stands in for a GPU on CPU hosts."""
    return "cpu" if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "y", "yes", "true", "on") else "cuda"


def why_unavailable(group: GroupContext, device: torch.device) -> str | None:
    """Why the backend cannot serve this group, in the same words on every rank; None when it can.

    Collective the first time a group asks, since one rank may lack what the others have.
    """
    if group.world > MAX_RANKS:
        return f"the triton backend takes groups of up to {MAX_RANKS} ranks, group '{group.name}' has {group.world}"
    if group.unreachable is not None:
        return group.unreachable

    def ask(group: GroupContext, _: int) -> str:
        said = [peer["problem"] for peer in group.exchange("triton", {"problem": _problem_of_this_rank()})]
        return next((f"rank {r}: {text}" for r, text in enumerate(said) if text), "")

    problem = group.fact("triton", ask) or None
    if problem is None and device.type == "cuda":
        return why_cuda_unavailable(group, device)
    return problem


def _problem_of_this_rank() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (on Linux it comes with CUDA builds of torch, or: pip install triton)"
    import triton

    is_interpreted = not isinstance(triton.language.sum, triton.JITFunction)
    if is_interpreted != (device_type() == "cpu"):
        return "TRITON_INTERPRET changed after Triton had been imported: set it before the process starts"
    return ""
