"""Embedding calls of ordinary sizes that every rank can make up for all ranks, with float64 references by torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer

LR, EPS, BETAS = 0.05, 1e-6, (0.8, 0.95)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass
class Problem:
    """One call: what every rank owns and looks up. Inputs are made on the device, alike on every rank."""

    layout: EmbeddingLayout
    pooling: str
    optimizer: str
    seed: int
    rows: int
    longest_bag: int
    weighted: bool

    @classmethod
    def draw(cls, seed: int, world: int, largest_batch: int = 3000) -> Problem:
        rng = random.Random(seed)
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        dims = [
            [rng.choice([4, 8, 32, 64, 96, 128, 256, 512, 1024, 12, 5]) for _ in range(rng.choice([0, 1, 2, 5]))]
            for _ in range(world)
        ]
        batches = [rng.choice([0, 1, 77, largest_batch // (world * 2), largest_batch // world]) for _ in range(world)]
        return cls(
            EmbeddingLayout.table_wise(dims, batches, dtype),
            rng.choice(["sum", "mean"]),
            OPTIMIZERS[seed % len(OPTIMIZERS)],
            seed,
            rng.choice([1, 3, 500, 20_000]),
            rng.choice([0, 1, 5, 20, 70, 200]),
            rng.random() < 0.3,
        )

    def owned(self, rank: int, device: torch.device) -> Owned:
        generator = torch.Generator(device).manual_seed(self.seed * 64 + rank)
        rand = lambda *shape: torch.rand(*shape, generator=generator, device=device)  # noqa: E731
        dims, batch = self.layout.feature_dims[rank], self.layout.global_batch
        tables = [(rand(self.rows, dim) - 0.5).to(self.layout.dtype) for dim in dims]
        lengths = (rand(len(dims) * batch) * (self.longest_bag + 1)).long()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        indices = (rand(int(offsets[-1])) ** 3 * self.rows).long().clamp(max=self.rows - 1)  # some rows are hot
        # One sign a feature and one a column: a row of many lookups is a long sum, and must not be a small difference of
        # large parts, of which fp32 leaves little.
        weights = None
        if self.weighted:
            sign = 1 - 2 * (torch.arange(len(dims), device=device) % 2).repeat_interleave(batch)
            weights = (rand(len(indices)) + 0.1) * torch.repeat_interleave(sign, lengths)
        column_sign = 1 - 2 * (torch.arange(self.layout.total_dim, device=device) % 3 % 2)
        grad = ((rand(self.layout.batch_sizes[rank], self.layout.total_dim) + 0.1) * column_sign).to(self.layout.dtype)
        states = FusedOptimizer.make_states(self.optimizer, tables, device)
        for state in states[: len(states) - (self.optimizer == "adam")]:
            state.fill_(0.1)
        if self.seed % 2:
            indices, offsets = indices.int(), offsets.int()
        return Owned(tables, states, indices, offsets, weights, grad)

    def optimizer_of(self, mine: Owned) -> FusedOptimizer:
        return FusedOptimizer(self.optimizer, LR, EPS, mine.states, BETAS, device=mine.indices.device)

    def run(self, mine: Owned, optimizer: FusedOptimizer | None = None, **options) -> Tensor:  # type: ignore[no-untyped-def]
        """The operator on tensors that backward will change."""
        return fused_ops.embedding_all_to_all(
            mine.tables,
            mine.indices,
            mine.offsets,
            self.layout,
            pooling=self.pooling,
            per_sample_weights=mine.weights,
            optimizer=optimizer or self.optimizer_of(mine),
            **options,
        )

    def expected_output(self, rank: int, everyone: Sequence[Owned]) -> Tensor:
        """[b, total_dim] in float64."""
        start = sum(self.layout.batch_sizes[:rank])
        mine = slice(start, start + self.layout.batch_sizes[rank])
        device = everyone[rank].indices.device
        parts = [self._pooled(owned, f)[mine] for owned in everyone for f in range(len(owned.tables))]
        empty = torch.zeros(self.layout.batch_sizes[rank], 0, dtype=torch.float64, device=device)
        return torch.cat([empty, *parts], dim=1)

    def expected_update(self, rank: int, everyone: Sequence[Owned]) -> tuple[list[Tensor], list[Tensor]]:
        """(tables, states) of that rank after one backward, in float64."""
        grads = torch.cat([owned.grad for owned in everyone]).double() / self.layout.world
        mine, tables, states = everyone[rank], [], [s.double() for s in everyone[rank].states]
        for t, table in enumerate(mine.tables):
            column = self.layout.feature_columns[rank][t]
            rows, bags, factors = self._lookups(mine, t)
            g = torch.zeros(table.shape, dtype=torch.float64, device=table.device)
            g.index_add_(0, rows, grads[bags, column : column + table.shape[1]] * factors[:, None])
            hit = torch.zeros(len(table), 1, dtype=torch.bool, device=table.device)
            hit[rows] = True
            tables.append(
                torch.where(hit, table.double() - LR * self._step(g, t, states, hit, len(mine.tables)), table.double())
            )
        if self.optimizer == "adam":
            states[-1] += 1
        return tables, states

    def _step(self, g: Tensor, t: int, states: list[Tensor], hit: Tensor, count: int) -> Tensor:
        if self.optimizer == "sgd":
            return g
        if self.optimizer == "adagrad":
            states[t] += g * g
            return g / (states[t].sqrt() + EPS)
        if self.optimizer == "rowwise_adagrad":
            states[t] += (g * g).mean(1)
            return g / (states[t].sqrt() + EPS)[:, None]
        m, v, step = states[t], states[count + t], states[-1] + 1
        m.copy_(torch.where(hit, BETAS[0] * m + (1 - BETAS[0]) * g, m))
        v.copy_(torch.where(hit, BETAS[1] * v + (1 - BETAS[1]) * g * g, v))
        return (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)

    def _lookups(self, owned: Owned, f: int) -> tuple[Tensor, Tensor, Tensor]:
        """(row, bag, factor in float64) of each lookup of a feature."""
        batch = self.layout.global_batch
        offsets = owned.offsets[f * batch : (f + 1) * batch + 1].long()
        begin, end = int(offsets[0]), int(offsets[-1])
        lengths = offsets.diff()
        bags = torch.repeat_interleave(torch.arange(batch, device=offsets.device), lengths)
        factors = torch.ones(end - begin, dtype=torch.float64, device=offsets.device)
        if owned.weights is not None:
            factors *= owned.weights[begin:end].double()
        if self.pooling == "mean":
            factors /= lengths.clamp(min=1)[bags]
        return owned.indices[begin:end].long(), bags, factors

    def _pooled(self, owned: Owned, f: int) -> Tensor:
        rows, bags, factors = self._lookups(owned, f)
        pooled = torch.zeros(
            self.layout.global_batch, owned.tables[f].shape[1], dtype=torch.float64, device=rows.device
        )
        return pooled.index_add_(0, bags, owned.tables[f].double()[rows] * factors[:, None])

    def check(self, got: Tensor, want: Tensor, what: str) -> None:
        tolerance = TOLERANCE[self.layout.dtype]
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(
            got.double(), want.double(), rtol=tolerance, atol=tolerance * scale, msg=lambda m: f"{what}, {self}: {m}"
        )


@dataclass
class Owned:
    """One rank's tensors. `run` changes tables and states in backward."""

    tables: list[Tensor]
    states: list[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    grad: Tensor

    def copy(self) -> Owned:
        clone = lambda tensors: [t.clone() for t in tensors]  # noqa: E731
        return Owned(clone(self.tables), clone(self.states), self.indices, self.offsets, self.weights, self.grad)

    def changed(self) -> list[Tensor]:
        return [*self.tables, *self.states]
