"""Variants of the exchange alone: the collective library, and this project's symmetric memory."""

from __future__ import annotations

import torch

import fused_ops
from launch.bench.settings import BenchSettings
from launch.bench.shapes import TORCH_DTYPES, AllToAllShape
from launch.bench.variants import Candidate, Session, Variant


def variants(session: Session, settings: BenchSettings, shape: AllToAllShape) -> list[Variant]:
    dtype, columns = TORCH_DTYPES[shape.dtype], shape.columns(session.world)
    inputs = [
        torch.randn(session.world, columns, device=session.device).to(dtype)
        for _ in range(session.rotations(session.world * columns * dtype.itemsize))
    ]

    def variant(candidate: Candidate) -> Variant:
        def run(i: int) -> torch.Tensor:
            return fused_ops.all_to_all(inputs[i % len(inputs)], group=candidate.group, comm=candidate.backend)

        return Variant(candidate.backend, "forward", run, candidate.nccl_ctas, len(inputs))

    return [variant(candidate) for candidate in session.candidates(shape)]
