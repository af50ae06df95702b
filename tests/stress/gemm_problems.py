"""Calls of the GEMM operators that every rank can make up for all ranks, with results that are exact in any order of summation.

All numbers are small whole ones, and so are their sums: float32 holds them, and so do bfloat16 and float16. A result is right
if it has the right bits; there is no tolerance for an error to hide in.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from tests.fused_ops.gemm_reference import rows_of

OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = {
    torch.float32: 4,
    torch.bfloat16: 1,
    torch.float16: 1,
}  # sums of hundreds of products stay below 2^8 in 16 bits
WEIGHTS = ("plain", "transposed", "rows apart")


@dataclass
class Problem:
    """One call. M rows in all; each rank has its own N_r of `columns` (all_gather_gemm) or K_r of `inner` (the others)."""

    operator: str
    seed: int
    rows: int
    columns: list[int]
    inner: list[int]
    dtype: torch.dtype = torch.float32
    bias: bool = False
    weights: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    leading: int = 1  # dimensions of the input before its last

    @classmethod
    def draw(cls, rng: random.Random, world: int, operator: str = "", large: bool = False) -> Problem:
        """Zero, one and uneven sizes among them; `large`: an output that a host sends in two phases."""
        operator = operator or rng.choice(OPERATORS)
        gathers = operator == "all_gather_gemm"
        size = lambda most: rng.choice([0, 1, 2, rng.randint(0, 40), rng.randint(0, most)])  # noqa: E731
        rows = rng.randint(150, 200) if large else size(200)
        uneven = [size(150) for _ in range(world)]
        same = [rng.randint(900, 1500) if large and not gathers else size(150)] * world
        options: dict[str, Any] = {}
        if gathers:
            options = {key: rng.random() < 0.5 for key in ("return_gathered", "save_gathered")}
            if rng.random() < 0.7:
                options["total_rows"] = rows
        return cls(
            operator,
            rng.randrange(1 << 40),
            rows,
            columns=uneven if gathers else same,
            inner=same if gathers else uneven,
            dtype=rng.choice(DTYPES),
            bias=rng.random() < 0.5,
            weights=rng.choice(WEIGHTS),
            options=options,
            leading=rng.choice([1, 2, 3]) if operator == "gemm_all_reduce" else 1,
        )

    @property
    def gathers(self) -> bool:
        return self.operator == "all_gather_gemm"

    def on(self, device: torch.device, rank: int, world: int) -> Call:
        return Call(self, device, rank, world)


class Call:
    """A problem on one rank of its group: what it passes to the operator, and what must come back."""

    def __init__(self, problem: Problem, device: torch.device, rank: int, world: int) -> None:
        self.problem, self.device, self.rank, self.world = problem, device, rank, world
        self.mine = rows_of(problem.rows, world, rank)
        self.input, self.weight = self._input(rank), self._strided(self._weight(rank))
        if problem.leading > 1:
            self.input = self.input.reshape(*[1] * (problem.leading - 1), *self.input.shape)
        self.bias = self._bias(rank) if problem.bias else None

    def run(self, group: dist.ProcessGroup | None = None, **options: Any) -> list[Tensor]:
        """The operator's outputs."""
        operator = getattr(fused_ops, self.problem.operator)
        result = operator(self.input, self.weight, self.bias, group=group, **self.problem.options, **options)
        return list(result) if isinstance(result, tuple) else [result]

    def run_with_backward(self, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, and the gradients of input, weight and (where there is one) bias."""
        for leaf in self.leaves:
            leaf.requires_grad_()
        outputs = self.run(**options)
        gradients = torch.autograd.grad(outputs, self.leaves, self._output_gradients())
        return [output.detach() for output in outputs], list(gradients)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.input, self.weight] + ([] if self.bias is None else [self.bias])

    def expected(self) -> list[Tensor]:
        problem = self.problem
        if problem.gathers:
            output = self._gathered().double() @ self._weight(self.rank).double().t()
        else:
            output = sum(self._product(rank) for rank in range(self.world))
        if problem.bias:
            output = output + self._bias(self.rank).double()
        if problem.operator == "gemm_reduce_scatter":
            output = output[self.mine]
        if problem.leading > 1:
            output = output.reshape(*[1] * (problem.leading - 1), *output.shape)
        returned = [self._gathered()] if problem.options.get("return_gathered") else []
        return [output.to(problem.dtype), *returned]

    def expected_gradients(self) -> list[Tensor]:
        grad = self._grad(self.rank).double()
        weight = self._weight(self.rank).double()
        if self.problem.gathers:
            of_input = sum(self._grad(rank).double() @ self._weight(rank).double() for rank in range(self.world))
            if self.problem.options.get("return_gathered"):
                of_input = of_input + sum(self._gathered_grad(rank).double() for rank in range(self.world))
            gradients = [of_input[self.mine], grad.t() @ self._gathered().double()]
        else:
            gradients = [grad @ weight, grad.t() @ self._input(self.rank).double()]
        if self.problem.bias:
            gradients.append(grad.sum(0))
        return [
            gradient.reshape(leaf.shape).to(self.problem.dtype)
            for gradient, leaf in zip(gradients, self.leaves, strict=True)
        ]

    def _output_gradients(self) -> list[Tensor]:
        grad = self._grad(self.rank)
        if self.problem.operator == "gemm_reduce_scatter":
            grad = grad[self.mine]
        if self.problem.leading > 1:
            grad = grad.reshape(*[1] * (self.problem.leading - 1), *grad.shape)
        returned = [self._gathered_grad(self.rank)] if self.problem.options.get("return_gathered") else []
        return [grad, *returned]

    def _values(self, what: str, rank: int, *shape: int) -> Tensor:
        seed = zlib.crc32(f"{self.problem.seed}/{what}/{rank}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        largest = LARGEST[self.problem.dtype]
        numbers = torch.randint(-largest, largest + 1, shape, generator=generator, device=self.device)
        return numbers.to(self.problem.dtype)

    def _input(self, rank: int) -> Tensor:
        if self.problem.gathers:
            return self._gathered()[rows_of(self.problem.rows, self.world, rank)].clone()
        return self._values("input", rank, self.problem.rows, self.problem.inner[rank])

    def _gathered(self) -> Tensor:
        return self._values("gathered", 0, self.problem.rows, self.problem.inner[0])

    def _weight(self, rank: int) -> Tensor:
        return self._values("weight", rank, self.problem.columns[rank], self.problem.inner[rank])

    def _bias(self, rank: int) -> Tensor:
        return self._values("bias", rank if self.problem.gathers else 0, self.problem.columns[rank])

    def _product(self, rank: int) -> Tensor:
        return self._input(rank).double() @ self._weight(rank).double().t()

    def _grad(self, rank: int) -> Tensor:
        """Of all rows of the output; the same on all ranks where the output's columns are."""
        return self._values("grad", rank if self.problem.gathers else 0, self.problem.rows, self.problem.columns[rank])

    def _gathered_grad(self, rank: int) -> Tensor:
        return self._values("gathered grad", rank, self.problem.rows, self.problem.inner[0])

    def _strided(self, weight: Tensor) -> Tensor:
        if self.problem.weights == "transposed":
            return weight.t().contiguous().t()
        if self.problem.weights == "rows apart":
            columns, inner = weight.shape
            apart = torch.full((columns, 2 * inner + 3), float("nan"), dtype=weight.dtype, device=weight.device)
            apart[:, 1 : 1 + inner] = weight
            return apart[:, 1 : 1 + inner]
        return weight
