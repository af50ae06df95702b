"""Variants of embedding + All-to-All: the collective library after FBGEMM, `all_to_all` after the same lookups, and fused."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from fused_ops.embedding_inputs import EmbeddingInputs
from fused_ops.symmetric.group import context, group_name
from launch.bench import all_to_all
from launch.bench.embedding_settings import Settings
from launch.bench.shapes import INDEX_BYTES, TORCH_DTYPES, EmbeddingShape
from launch.bench.variants import Candidate, Session, Variant, exists


class Problem:
    """One rank's part of a shape: rotated ids, the layout, an output gradient."""

    def __init__(self, session: Session, shape: EmbeddingShape, mode: str = "sum") -> None:
        world, batch = session.world, shape.batch
        self.session, self.shape, self.mode = session, shape, mode
        self.dtype = TORCH_DTYPES[shape.dtype]
        batch_sizes = [batch // world + (r < batch % world) for r in range(world)]
        self.layout = EmbeddingLayout.table_wise([[shape.dim] * shape.tables_per_rank] * world, batch_sizes, self.dtype)
        sizes = torch.tensor(shape.bag_sizes).repeat_interleave(batch)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(session.device)
        row_bytes = shape.dim * self.dtype.itemsize
        self.indices = [self._draw() for _ in range(session.rotations(shape.lookups * (row_bytes + INDEX_BYTES)))]
        output = (batch_sizes[session.rank], self.layout.total_dim)
        self.output_grad = torch.randn(output, device=session.device).to(self.dtype)

    def _draw(self) -> Tensor:
        """[nnz] ids, uniform over each table's rows."""
        device, batch = self.session.device, self.shape.batch
        return torch.cat(
            [
                torch.randint(0, rows, (batch * size,), device=device)
                for rows, size in zip(self.shape.table_rows, self.shape.bag_sizes, strict=True)
            ]
        )

    def weights(self) -> tuple[list[Tensor], FusedOptimizer]:
        """Tables in one storage and states in one each, as FBGEMM's module lays them out: it serves them in one kernel call."""
        rows, dim = self.shape.table_rows, self.shape.dim
        flat = self.session.tables(sum(rows) * dim, self.dtype).view(-1, dim)
        states = FusedOptimizer.make_states(self.shape.optimizer, [flat])
        split = [part for state in states for part in (state.split(rows) if len(state) == len(flat) else [state])]
        return list(flat.split(rows)), FusedOptimizer(self.shape.optimizer, states=split, device=self.session.device)

    def inputs(self, tables: list[Tensor], indices: Tensor) -> EmbeddingInputs:
        return EmbeddingInputs(
            tables=tables,
            indices=indices,
            offsets=self.offsets,
            weights=None,
            given_feature_tables=None,
            encoded_layout=self.layout.encoded,
            dtype=self.dtype,
            pooling=self.mode,
            out_of_range="error",
            rank=self.session.rank,
            world=self.session.world,
        )

    def pick(self, i: int) -> Tensor:
        return self.indices[i % len(self.indices)]


def variants(session: Session, settings: Settings, shape: EmbeddingShape) -> list[Variant]:
    problem = Problem(session, shape, settings.mode)
    built: list[Variant] = []
    for candidate in session.candidates(shape):
        tables, optimizer = problem.weights()
        built += _whole(problem, candidate, tables, optimizer)
        if candidate.backend != "unfused":
            built += lookups_alone(problem, candidate, tables)
            built += _exchange_alone(problem, candidate)
    return built


def exchange(session: Session, shape: EmbeddingShape, group: dist.ProcessGroup | None) -> Callable[[int], Tensor]:
    """Of the pooled rows by the collective library, as if the batch were split evenly."""
    return all_to_all.even_exchange(session, shape, group)


def _whole(problem: Problem, candidate: Candidate, tables: list[Tensor], optimizer: FusedOptimizer) -> list[Variant]:
    def operator(i: int) -> Tensor:
        return fused_ops.embedding_all_to_all(
            tables,
            problem.pick(i),
            problem.offsets,
            problem.layout,
            pooling=problem.mode,
            optimizer=optimizer,
            group=candidate.group,
            comm=candidate.backend,
        )

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return operator(i)

    def forward_backward(i: int) -> None:
        operator(i).backward(problem.output_grad)

    return [
        Variant(candidate.backend, "forward", forward, candidate.nccl_ctas, len(problem.indices)),
        Variant(candidate.backend, "forward_backward", forward_backward, candidate.nccl_ctas, len(problem.indices)),
    ]


def lookups_alone(problem: Problem, candidate: Candidate, tables: list[Tensor]) -> list[Variant]:
    """That backend's lookups into a local buffer [B, D]."""
    inputs = [problem.inputs(tables, ids) for ids in problem.indices]
    try:
        pool = _pooling_kernel(candidate, inputs[0])
    except ValueError as reason:
        problem.session.leave_out(f"{candidate.backend} compute_alone", str(reason))
        return []
    return [Variant(candidate.backend, "compute_alone", lambda i: pool(inputs[i % len(inputs)]), None, len(inputs))]


def _pooling_kernel(candidate: Candidate, inputs: EmbeddingInputs) -> Callable[[EmbeddingInputs], Tensor]:
    """ValueError, with the reason, where the backend has none for these inputs."""
    if candidate.backend == "baseline":
        if inputs.indices.is_cuda:
            from fused_ops.backends.baseline import embedding_fbgemm_cuda

            if problem := embedding_fbgemm_cuda.why_not(inputs):
                raise ValueError(problem)
            return embedding_fbgemm_cuda.pool
        from fused_ops.backends.baseline import embedding_fbgemm
        from fused_ops.backends.baseline.embedding_values import Lookups

        return lambda inputs: embedding_fbgemm.pool(Lookups(inputs))
    if candidate.backend == "host":
        from fused_ops.backends.unfused.embedding_host import pooled_locally

        return pooled_locally
    backend = importlib.import_module(f"fused_ops.backends.{candidate.backend}.embedding_all_to_all")
    pool = getattr(backend, "pooled_locally", None)
    if pool is None:
        raise ValueError("it has no lookups to time alone")
    group = context(group_name(candidate.group))
    return lambda inputs: pool(inputs, group)


def _exchange_alone(problem: Problem, candidate: Candidate) -> list[Variant]:
    """The pooled rows' exchange, without lookups and without the reorder after."""
    layout, rank = problem.layout, problem.session.rank
    if not exists(candidate.backend, "all_to_all"):
        return []
    sent = [size * layout.local_dim(rank) for size in layout.batch_sizes]
    received = [layout.batch_sizes[rank] * layout.local_dim(r) for r in range(layout.world)]
    data = torch.randn(sum(sent), device=problem.session.device).to(problem.dtype)
    even = len({*sent, *received}) == 1

    def run(i: int) -> Tensor:
        return fused_ops.all_to_all(
            data,
            input_splits=None if even else sent,
            output_splits=None if even else received,
            group=candidate.group,
            comm=candidate.backend,
        )

    return [Variant(candidate.backend, "exchange_alone", run, candidate.nccl_ctas, len(problem.indices))]
