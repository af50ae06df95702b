"""Tokens of several ranks routed to experts, every rank's part known to every rank, and the exact results in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def assert_rounded(
    actual: Tensor, exact: Tensor, terms: int, rounded: Tensor | float = 0.0, factor: torch.dtype | None = None
) -> None:
    """`actual` is `exact`, a float32 sum of that many products of standard normal numbers, rounded once to its dtype.

    rounded: the sum of the magnitudes of what was rounded to `factor` (by default the same dtype) on the way.
    """
    assert actual.shape == exact.shape
    unit = torch.finfo(actual.dtype).eps / 2
    earlier = unit if factor is None else torch.finfo(factor).eps / 2
    limit = unit * exact.abs() + earlier * rounded + 4e-5 * max(1, terms / 100) ** 0.5 + 4e-6 * exact.abs()
    off = (actual.double() - exact).abs()
    assert bool((off <= limit).all()), f"off by {off.max():.3g}, at most {(off / limit).max():.3g} of the limit"


def rank_and_world(group=None) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


@dataclass
class MoeProblem:
    """A layer of `experts` experts: hidden -> inner -> hidden, and what each rank's tokens are routed to.

    inputs[r] [T_r, hidden]; up [experts, inner, hidden], down [experts, hidden, inner]; tokens[r], experts_of[r] and gates[r]
    [R_r], rows sorted by expert; grads[r] [T_r, hidden] of the layer's output.
    """

    inputs: list[Tensor]
    up: Tensor
    down: Tensor
    tokens: list[Tensor]
    experts_of: list[Tensor]
    gates: list[Tensor]
    grads: list[Tensor]

    @classmethod
    def random(
        cls,
        seed: int,
        num_tokens: list[int],
        experts: int,
        top_k: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        allowed: list[int] | None = None,
        dropped: float = 0.0,
        gates_dtype: torch.dtype = torch.float32,
    ) -> MoeProblem:
        """Each token goes to `top_k` different experts of `allowed` (all, unless told), or fewer: every one is left out with
        the chance `dropped`."""
        generator = torch.Generator().manual_seed(seed)
        hidden, inner = sizes

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        choices = torch.tensor(range(experts) if allowed is None else allowed)
        tokens, experts_of, gates = [], [], []
        for count in num_tokens:
            order = torch.rand(count, len(choices), generator=generator).argsort(1)[:, :top_k]
            chosen = choices[order].flatten()
            of_token = torch.arange(count).repeat_interleave(order.shape[1])
            kept = torch.rand(len(chosen), generator=generator) >= dropped
            chosen, of_token = chosen[kept], of_token[kept]
            sorted_experts, rows = chosen.sort(stable=True)
            tokens.append(of_token[rows])
            experts_of.append(sorted_experts)
            gates.append(torch.randn(len(rows), generator=generator).to(gates_dtype))
        return cls(
            [values(count, hidden) for count in num_tokens],
            values(experts, inner, hidden),
            values(experts, hidden, inner),
            tokens,
            experts_of,
            gates,
            [values(count, hidden) for count in num_tokens],
        )

    @property
    def world(self) -> int:
        return len(self.inputs)

    @property
    def experts(self) -> int:
        return self.up.shape[0]

    def counts(self, rank: int) -> Tensor:
        return self.experts_of[rank].bincount(minlength=self.experts)

    def mine(self, rank: int) -> slice:
        """The experts of a rank."""
        return slice(rank * self.experts // self.world, (rank + 1) * self.experts // self.world)

    def received(self, rank: int) -> Tensor:
        return torch.stack([self.counts(source) for source in range(self.world)], 1)[self.mine(rank)]

    def dispatched_from(self, rank: int) -> tuple[Tensor, Tensor]:
        """(source, routed row of that source) of each row that the experts of a rank get, in order."""
        order = [
            (source, row)
            for expert in range(self.experts)[self.mine(rank)]
            for source in range(self.world)
            for row in (self.experts_of[source] == expert).nonzero().flatten().tolist()
        ]
        pairs = torch.tensor(order, dtype=torch.int64).view(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def dispatched(self, rank: int, rows: list[Tensor]) -> Tensor:
        """What the experts of a rank get of `rows[source]` [R_source, ...], in order."""
        sources, of_source = self.dispatched_from(rank)
        starts = torch.tensor([0, *(len(piece) for piece in rows)]).cumsum(0)
        return torch.cat(rows)[starts[sources] + of_source]

    def most_rows_of_a_token(self, rank: int) -> int:
        return max(1, *self.tokens[rank].bincount().tolist(), 0)

    def rows(self, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """The input of each routed row."""
        return self.inputs[rank].to(dtype)[self.tokens[rank]]

    def combine(self, rank: int, rows: Tensor, gates: Tensor) -> Tensor:
        """For each token the sum of gate times row, in float64."""
        sums = torch.zeros(self.inputs[rank].shape[0], rows.shape[1], dtype=torch.float64)
        return sums.index_add(0, self.tokens[rank], rows.double() * gates.double().unsqueeze(1))
