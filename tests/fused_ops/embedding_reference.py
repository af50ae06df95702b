"""Random calls of `embedding_all_to_all` that every rank can make up for all ranks, and what must come out, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer

DIMS = [1, 2, 3, 7, 8, 16, 17, 32, 48, 64, 100, 128, 130, 256, 300, 1024]
BETAS = (0.8, 0.95)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LR, EPS = 0.05, 1e-6


@dataclass
class RankCase:
    """One rank's part of a call."""

    tables: list[Tensor]
    states: list[Tensor]
    feature_tables: list[int]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    output_grad: Tensor


@dataclass
class Case:
    """One call as all ranks see it."""

    layout: EmbeddingLayout
    pooling: str
    optimizer: str
    average: bool
    ranks: list[RankCase] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int, world: int, optimizer: str | None = None, dtype: torch.dtype | None = None) -> Case:
        """Uneven and empty batches, ranks without tables, shared tables, empty bags, scattered columns."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        dtype = dtype or rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        optimizer = optimizer or rng.choice(["none", "sgd", "adagrad", "rowwise_adagrad", "adam"])
        batch_sizes = [rng.choice([0, 1, 2, 5, 9]) for _ in range(world)]
        shapes = [
            [(rng.choice([1, 4, 60]), rng.choice(DIMS)) for _ in range(rng.choice([0, 1, 2, 3]))] for _ in range(world)
        ]
        feature_tables = []
        for owned in shapes:
            features = [t for t in range(len(owned)) for _ in range(rng.choice([0, 1, 1, 2]))]
            if rng.random() < 0.3:
                rng.shuffle(features)
            feature_tables.append(features)
        dims = [[owned[t][1] for t in features] for owned, features in zip(shapes, feature_tables, strict=True)]
        case = cls(
            _scattered(dims, batch_sizes, dtype, rng), rng.choice(["sum", "mean"]), optimizer, rng.random() < 0.5
        )
        weighted = rng.random() < 0.4
        longest = rng.choice([1, 4, 4, 200])
        for rank in range(world):
            case._add_rank(rank, shapes[rank], feature_tables[rank], longest, weighted, rng, generator)
        return case

    def _add_rank(self, rank, shapes, features, longest, weighted, rng, generator):  # type: ignore[no-untyped-def]
        dtype, batch = self.layout.dtype, self.layout.global_batch
        make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        tables = [make(rows, dim).to(dtype) for rows, dim in shapes]
        states = {
            "adagrad": [make(rows, dim).abs() + 0.1 for rows, dim in shapes],
            "rowwise_adagrad": [make(rows).abs() + 0.1 for rows, _ in shapes],
            "adam": [
                *(make(rows, dim) for rows, dim in shapes),
                *(make(rows, dim).abs() + 0.1 for rows, dim in shapes),
                torch.tensor([rng.choice([0, 7])]),
            ],
        }.get(self.optimizer, [])
        lengths = torch.randint(-1, longest + 1, (len(features) * batch,), generator=generator).clamp(min=0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        index_type, offset_type = rng.choice([torch.int32, torch.int64]), rng.choice([torch.int32, torch.int64])
        parts = [
            torch.randint(0, shapes[t][0], (int(lengths[f * batch : (f + 1) * batch].sum()),), generator=generator)
            for f, t in enumerate(features)
        ]
        indices = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
        weights = torch.rand(len(indices), generator=generator) - 0.3 if weighted else None
        output_grad = make(self.layout.batch_sizes[rank], self.layout.total_dim).to(dtype)
        self.ranks.append(
            RankCase(tables, states, features, indices.to(index_type), offsets.to(offset_type), weights, output_grad)
        )

    def run(self, rank: int, device: torch.device | str = "cpu", **options) -> Result:  # type: ignore[no-untyped-def]
        """The operator's forward and backward on copies of this rank's tables and states."""
        mine = self.ranks[rank]
        copy = lambda tensor: tensor.to(device, copy=True)  # noqa: E731
        tables = [copy(t).requires_grad_(self.optimizer == "none") for t in mine.tables]
        states = [copy(s) for s in mine.states]
        weights = None if mine.weights is None else copy(mine.weights).requires_grad_()
        output = fused_ops.embedding_all_to_all(
            tables,
            copy(mine.indices),
            copy(mine.offsets),
            self.layout,
            feature_tables=mine.feature_tables,
            pooling=self.pooling,
            per_sample_weights=weights,
            optimizer=None
            if self.optimizer == "none"
            else FusedOptimizer(self.optimizer, LR, EPS, states, BETAS, device=device),
            average_over_ranks=self.average,
            **options,
        )
        assert output.requires_grad, "a rank without tables must still take part in backward"
        kept = output.detach().clone()
        output.backward(copy(mine.output_grad))
        table_grads = [t.grad for t in tables] if self.optimizer == "none" else []
        return Result(
            kept, [t.detach() for t in tables], states, table_grads, None if weights is None else weights.grad
        )

    def check(self, rank: int, result: Result) -> None:
        """`result` against float64, to the dtype's tolerance."""
        expected = self._expected(rank)
        dtype = self.layout.dtype
        assert result.output.dtype == dtype
        _close(result.output, expected.output, TOLERANCE[dtype])
        for got, want in zip(result.tables, expected.tables, strict=True):
            _close(got, want, TOLERANCE[dtype])
        for got, want in zip(result.states, expected.states, strict=True):
            _close(got, want, TOLERANCE[dtype])
        for got, want in zip(result.table_grads, expected.table_grads, strict=True):
            assert got is not None
            assert got.dtype == dtype
            _close(got, want, TOLERANCE[dtype])
        if expected.weights_grad is not None:
            assert result.weights_grad is not None
            _close(result.weights_grad, expected.weights_grad, TOLERANCE[dtype])

    def _expected(self, rank: int) -> Result:
        """Dense float64 autograd over all ranks' tables, then the optimizer's formula on this rank's rows that were hit."""
        world, batch = self.layout.world, self.layout.global_batch
        leaves = [[t.double().requires_grad_() for t in r.tables] for r in self.ranks]
        weights = [None if r.weights is None else r.weights.double().requires_grad_() for r in self.ranks]
        full = torch.zeros(batch, self.layout.total_dim, dtype=torch.float64)
        for r, case in enumerate(self.ranks):
            for f, t in enumerate(case.feature_tables):
                column = self.layout.feature_columns[r][f]
                for b in range(batch):
                    begin, end = int(case.offsets[f * batch + b]), int(case.offsets[f * batch + b + 1])
                    rows = leaves[r][t][case.indices[begin:end].long()]
                    if weights[r] is not None:
                        rows = rows * weights[r][begin:end, None]  # type: ignore[index]
                    pooled = rows.sum(0) / (max(end - begin, 1) if self.pooling == "mean" else 1)
                    full[b, column : column + pooled.shape[0]] = pooled
        grads = torch.cat([r.output_grad for r in self.ranks]).double() / (world if self.average else 1)
        if full.requires_grad:
            full.backward(grads)
        start = sum(self.layout.batch_sizes[:rank])
        mine, own = self.ranks[rank], leaves[rank]
        gradient = [torch.zeros_like(t) if t.grad is None else t.grad for t in own]
        tables, states = [t.detach().clone() for t in own], [s.double() for s in mine.states]
        for t, g in enumerate(gradient if self.optimizer != "none" else []):
            if self.optimizer == "adagrad":
                states[t] += g * g
                tables[t] -= LR * g / (states[t].sqrt() + EPS)
            elif self.optimizer == "rowwise_adagrad":
                states[t] += (g * g).mean(1)
                tables[t] -= LR * g / (states[t].sqrt() + EPS)[:, None]
            elif self.optimizer == "adam":
                self._adam(rank, t, g, tables, states)
            else:
                tables[t] -= LR * g
        if self.optimizer == "adam":
            states[-1] += 1
        weights_grad = None
        if weights[rank] is not None:
            leaf = weights[rank]
            weights_grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # type: ignore[arg-type, union-attr]
        output = full.detach()[start : start + self.layout.batch_sizes[rank]]
        return Result(output, tables, states, gradient if self.optimizer == "none" else [], weights_grad)

    def _adam(self, rank: int, t: int, g: Tensor, tables: list[Tensor], states: list[Tensor]) -> None:
        mine, batch, step = self.ranks[rank], self.layout.global_batch, states[-1] + 1
        hit = torch.zeros(len(tables[t]), 1, dtype=torch.bool)
        for f in (f for f, table in enumerate(mine.feature_tables) if table == t):
            begin, end = int(mine.offsets[f * batch]), int(mine.offsets[(f + 1) * batch])
            hit[mine.indices[begin:end].long()] = True
        m, v = states[t], states[len(tables) + t]
        m.copy_(torch.where(hit, BETAS[0] * m + (1 - BETAS[0]) * g, m))
        v.copy_(torch.where(hit, BETAS[1] * v + (1 - BETAS[1]) * g * g, v))
        change = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        tables[t] -= torch.where(hit, LR * change, 0.0)


@dataclass
class Result:
    output: Tensor
    tables: list[Tensor]
    states: list[Tensor]
    table_grads: list
    weights_grad: Tensor | None

    def cpu(self) -> Result:
        move = lambda tensors: [None if t is None else t.cpu() for t in tensors]  # noqa: E731
        return Result(
            self.output.cpu(),
            move(self.tables),
            move(self.states),
            move(self.table_grads),
            None if self.weights_grad is None else self.weights_grad.cpu(),
        )

    def equals(self, other: Result) -> bool:
        """To the bit."""
        mine, theirs = self._all(), other._all()
        return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def _all(self) -> list[Tensor]:
        last = [] if self.weights_grad is None else [self.weights_grad]
        return [self.output, *self.tables, *self.states, *self.table_grads, *last]


def _scattered(
    dims: list[list[int]], batch_sizes: list[int], dtype: torch.dtype, rng: random.Random
) -> EmbeddingLayout:
    """The features of all ranks in a random order of columns."""
    pieces = [(r, f) for r, owned in enumerate(dims) for f in range(len(owned))]
    if rng.random() < 0.5:
        rng.shuffle(pieces)
    columns = [[0] * len(owned) for owned in dims]
    at = 0
    for r, f in pieces:
        columns[r][f] = at
        at += dims[r][f]
    return EmbeddingLayout(dims, columns, batch_sizes, at, dtype)


def _close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)
