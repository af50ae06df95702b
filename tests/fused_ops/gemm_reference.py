"""One product that ranks share the inner dimension of, with every rank's part known to every rank, and its exact result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# A result rounded once from float32 sums: half a unit in the last place, and the sums' own error.
ROUNDED_ONCE = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4},
    torch.float16: {"rtol": 2**-10, "atol": 1e-4},
}
# A library that rounds every partial sum, and every addition of two.
ROUNDED_OFTEN = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-5},
    torch.bfloat16: {"rtol": 2**-5, "atol": 0.15},
    torch.float16: {"rtol": 2**-8, "atol": 0.02},
}


def tolerance(comm: str, dtype: torch.dtype, terms: int = 100) -> dict[str, float]:
    """For sums of that many products of standard normal numbers."""
    limits = (ROUNDED_OFTEN if comm == "baseline" else ROUNDED_ONCE)[dtype]
    return {**limits, "atol": limits["atol"] * max(1, terms / 100) ** 0.5}


@dataclass
class Problem:
    """inputs[r] [*leading, inner[r]], weights[r] [columns, inner[r]], bias [columns]; grad [*leading, columns]."""

    inputs: list[Tensor]
    weights: list[Tensor]
    bias: Tensor | None
    grad: Tensor

    @classmethod
    def random(
        cls, seed: int, leading: tuple[int, ...], columns: int, inner: list[int], dtype: torch.dtype, bias: bool = True
    ) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return cls(
            [values(*leading, size) for size in inner],
            [values(columns, size) for size in inner],
            values(columns) if bias else None,
            values(*leading, columns),
        )

    @property
    def exact(self) -> Tensor:
        """The whole output, in float64."""
        products = [
            input.double() @ weight.double().t() for input, weight in zip(self.inputs, self.weights, strict=True)
        ]
        return sum(products) + (0 if self.bias is None else self.bias.double())

    def leaves(self, rank: int, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's input, weight and bias, ready for backward. `transposed`: the weight is a transposed view."""
        weight = self.weights[rank]
        weight = weight.t().contiguous().t() if transposed else weight.clone()
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        return self.inputs[rank].clone().requires_grad_(), weight.requires_grad_(), bias

    @property
    def terms(self) -> int:
        """The most products that one element of the output or of a gradient is a sum of."""
        return max(
            self.grad.shape[-1],
            self.grad.numel() // max(1, self.grad.shape[-1]),
            sum(weight.shape[1] for weight in self.weights),
        )

    def exact_gradients(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's input, weight and bias, in float64, where the output's gradient is `grad`."""
        grad = self.grad.double()
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
        input = self.inputs[rank].double().reshape(rows.shape[0], self.inputs[rank].shape[-1])
        return grad @ self.weights[rank].double(), rows.t() @ input, rows.sum(0)


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def rows_of(total: int, world: int, rank: int) -> slice:
    """Which of `total` rows a rank has, written out."""
    counts = [len(range(r, total, world)) for r in range(world)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))
