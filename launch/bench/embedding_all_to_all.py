"""Variants of embedding + All-to-All: FBGEMM + gloo, the same lookups + `all_to_all` (unfused), and the fused operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from fused_ops.backends.baseline import embedding_fbgemm
from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.backends.unfused.embedding_all_to_all import pooled_locally
from fused_ops.embedding_inputs import EmbeddingInputs
from launch.bench.all_to_all import TORCH_DTYPES
from launch.bench.harness import Variant, stream_rate
from launch.bench.settings import BenchSettings

COMMS = {"baseline": "baseline", "unfused": "unfused", "host": "host"}


def variants(settings: BenchSettings, shape: dict[str, int]) -> list[Variant]:
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = TORCH_DTYPES[settings.dtype]
    tables, dim, batch, pooling = shape["tables_per_rank"], shape["dim"], shape["batch"], shape["pooling"]
    batch_sizes = [batch // world + (r < batch % world) for r in range(world)]
    layout = EmbeddingLayout.table_wise([[dim] * tables] * world, batch_sizes, dtype)
    offsets = torch.arange(tables * batch + 1, dtype=torch.int64) * pooling
    indices = [torch.randint(0, shape["rows"], (int(offsets[-1]),)) for _ in range(settings.rotate)]
    output_grad = torch.randn(batch_sizes[rank], layout.total_dim).to(dtype)

    # Bytes a rank moves at least: a row read an id, ids read, the pooled rows written; rates measured with all ranks at once.
    row_bytes = dim * dtype.itemsize
    reads = indices[0].numel() * (row_bytes + 8)
    pooled = tables * batch * row_bytes
    limit_ms = (reads / stream_rate(read=True) + 2 * pooled / stream_rate(read=False)) * 1e3

    built: list[Variant] = []
    for backend, comm in COMMS.items():
        # One storage for tables, one for states, as FBGEMM's module lays them out: it serves them in one kernel call.
        flat = torch.randn(tables * shape["rows"], dim).to(dtype)
        weights = list(flat.split(shape["rows"]))
        states = [
            s for flat in FusedOptimizer.make_states(settings.optimizer, [flat]) for s in flat.split(shape["rows"])
        ]
        optimizer = FusedOptimizer(settings.optimizer, states=states)
        operator = _operator(comm, weights, indices, offsets, layout, settings.mode, optimizer)

        def forward(i: int, operator: Callable = operator) -> Tensor:
            with torch.no_grad():
                return operator(i)

        def forward_backward(i: int, operator: Callable = operator) -> None:
            operator(i).backward(output_grad)

        built.append(Variant(backend, "forward", forward, limit_ms))
        built.append(Variant(backend, "forward_backward", forward_backward))
        if backend != "unfused":
            built.append(
                Variant(
                    backend, "compute_alone", _lookups_alone(comm, weights, indices, offsets, layout, settings.mode)
                )
            )
    built += [_exchange_alone(backend, layout, rank, dtype) for backend in ("baseline", "host")]
    return built


def _operator(
    comm: str,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: Tensor,
    layout: EmbeddingLayout,
    mode: str,
    optimizer: FusedOptimizer,
) -> Callable[[int], Tensor]:
    def run(i: int) -> Tensor:
        ids = indices[i % len(indices)]
        return fused_ops.embedding_all_to_all(
            weights, ids, offsets, layout, pooling=mode, optimizer=optimizer, comm=comm
        )

    return run


def _lookups_alone(
    backend: str, weights: list[Tensor], indices: list[Tensor], offsets: Tensor, layout: EmbeddingLayout, mode: str
) -> Callable[[int], Tensor]:
    """That backend's lookups into a local buffer [B, D]."""
    inputs = [
        EmbeddingInputs(
            weights,
            ids,
            offsets,
            None,
            None,
            layout.encoded,
            layout.dtype,
            mode,
            "error",
            dist.get_rank(),
            layout.world,
        )
        for ids in indices
    ]

    def run(i: int) -> Tensor:
        chosen = inputs[i % len(inputs)]
        return embedding_fbgemm.pool(Lookups(chosen)) if backend == "baseline" else pooled_locally(chosen)

    return run


def _exchange_alone(backend: str, layout: EmbeddingLayout, rank: int, dtype: torch.dtype) -> Variant:
    """The pooled rows' exchange, without lookups and without the reorder after."""
    sent = [size * layout.local_dim(rank) for size in layout.batch_sizes]
    received = [layout.batch_sizes[rank] * layout.local_dim(r) for r in range(layout.world)]
    data = torch.randn(sum(sent)).to(dtype)
    even = len({*sent, *received}) == 1

    def run(i: int) -> Tensor:
        return fused_ops.all_to_all(
            data, input_splits=None if even else sent, output_splits=None if even else received, comm=backend
        )

    return Variant(backend, "exchange_alone", run)
