"""Variants of the exchange alone: gloo, and this project's symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fused_ops
from launch.bench.harness import Variant, stream_rate
from launch.bench.settings import BenchSettings

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def variants(settings: BenchSettings, shape: dict[str, int]) -> list[Variant]:
    world = dist.get_world_size()
    dtype = TORCH_DTYPES[settings.dtype]
    columns = max(1, shape["kib"] * 1024 // world // dtype.itemsize)
    inputs = [torch.randn(world, columns).to(dtype) for _ in range(settings.rotate)]
    # Every byte that a rank receives is read once and written once.
    limit_ms = 2 * inputs[0].numel() * dtype.itemsize / stream_rate(read=False) * 1e3

    def variant(backend: str, comm: str) -> Variant:
        def run(i: int) -> torch.Tensor:
            return fused_ops.all_to_all(inputs[i % len(inputs)], comm=comm)

        return Variant(backend, "forward", run, limit_ms)

    return [variant("baseline", "baseline"), variant("host", "host")]
