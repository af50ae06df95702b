"""What the GEMM operators' benchmarks share: settings, one rank's tensors, and the variants that are timed on them.

N and K are of all ranks. Each call takes the next of several weights, so that no cache holds the one it reads.
"""

from __future__ import annotations

import importlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused_ops.gemm_inputs import GemmInputs
from launch.bench.settings import BenchSettings, as_list, check_counts
from launch.bench.shapes import TORCH_DTYPES, Shape
from launch.bench.torch_symmetric import COLUMNS as RIVALS
from launch.bench.torch_symmetric import Pick
from launch.bench.variants import Candidate, Session, Variant


@dataclass(frozen=True)
class Sizes:
    """Of one rank's tensors.

    product: of the input that its GEMM takes. exchanged: of an input and a weight that leave the operator nothing but its
    exchange to do, of as many bytes as it has.
    """

    input: tuple[int, int]
    weight: tuple[int, int]
    output: tuple[int, int]
    product: tuple[int, int]
    exchanged: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class GemmShape(Shape):
    m: int
    n: int
    k: int
    dtype: str = "fp32"

    compute = "GEMM"

    @property
    def output_bytes(self) -> int:
        return self.m * self.n * TORCH_DTYPES[self.dtype].itemsize

    @abstractmethod
    def sizes(self, rank: int, world: int) -> Sizes:
        """Of that rank's tensors."""


@dataclass
class GemmSettings(BenchSettings):
    m: Any = None  # rows of the input; default 1, 8, 64, 1024
    n: Any = 4096
    k: Any = 4096

    shape: ClassVar[type[GemmShape]]

    def check(self) -> None:
        super().check()
        for key in ("m", "n", "k"):
            check_counts(self, key)

    def shapes(self, link: str = "auto") -> Iterator[GemmShape]:
        swept = itertools.product(
            as_list(self.dtype), as_list(self.n), as_list(self.k), as_list(self.m) or [1, 8, 64, 1024]
        )
        for dtype, n, k, m in swept:
            yield self.shape(m, n, k, dtype)


def columns(*rivals: str) -> dict[str, tuple[str, ...]]:
    """Of an operator to which torch has those rivals on GPUs."""
    return {"cpu": ("baseline", "host", "auto"), "cuda": ("baseline", *rivals, "cuda", "triton", "auto")}


class Call(Protocol):
    """The operator on a shape."""

    def __call__(self, input: Tensor, weight: Tensor, *, group: dist.ProcessGroup | None, comm: str) -> Tensor: ...


@dataclass(frozen=True)
class Ways:
    """An operator's ways to be run on a shape.

    host_product: the local GEMM of the host's backend. rival: (column, pick, group) -> a run of torch's own operator.
    """

    operator: str
    call: Call
    host_product: Callable[[GemmInputs], Tensor]
    rival: Callable[[str, Pick, dist.ProcessGroup | None], Callable[[int], Tensor]]


def variants(session: Session, shape: GemmShape, ways: Ways) -> list[Variant]:
    problem = Problem(session, shape, ways)
    return [variant for candidate in session.candidates(shape) for variant in problem.variants(candidate)]


def exchange(session: Session, shape: GemmShape, call: Call, group: dist.ProcessGroup | None) -> Callable[[int], Any]:
    """The collective library's exchange of that operator and shape."""
    return _exchange(session, shape, call, Candidate("baseline", group))


class Problem:
    """One rank's part of a shape: rotated inputs and weights, and an output gradient."""

    def __init__(self, session: Session, shape: GemmShape, ways: Ways) -> None:
        self.session, self.shape, self.ways = session, shape, ways
        self.dtype = TORCH_DTYPES[shape.dtype]
        self.sizes = shape.sizes(session.rank, session.world)
        largest = shape.sizes(0, session.world)  # as many inputs on every rank
        touched = sum(rows * columns for rows, columns in (largest.product, largest.weight, largest.output))
        self.count = session.rotations(touched * self.dtype.itemsize)
        self.inputs = [self._draw(self.sizes.input) for _ in range(self.count)]
        self.weights = [self._draw(self.sizes.weight) for _ in range(self.count)]
        self.output_grad = self._draw(self.sizes.output)

    def _draw(self, size: tuple[int, int]) -> Tensor:
        return torch.randn(size, device=self.session.device).to(self.dtype)

    def pick(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i % self.count], self.weights[i % self.count]

    def variants(self, candidate: Candidate) -> list[Variant]:
        if candidate.backend in RIVALS:
            run = self.ways.rival(candidate.backend, self.pick, candidate.group)
            return [self._variant(candidate, "forward", run)]
        whole = [
            self._variant(candidate, "forward", self._forward(candidate)),
            self._variant(candidate, "forward_backward", self._forward_backward(candidate)),
        ]
        if candidate.backend == "auto":
            return whole
        alone = _exchange(self.session, self.shape, self.ways.call, candidate)
        return [*whole, *self._product_alone(candidate), self._variant(candidate, "exchange_alone", alone)]

    def _variant(self, candidate: Candidate, phase: str, run: Callable[[int], Any]) -> Variant:
        return Variant(candidate.backend, phase, run, candidate.nccl_ctas, self.count)

    def _forward(self, candidate: Candidate) -> Callable[[int], Tensor]:
        def forward(i: int) -> Tensor:
            with torch.no_grad():
                return self.ways.call(*self.pick(i), group=candidate.group, comm=candidate.backend)

        return forward

    def _forward_backward(self, candidate: Candidate) -> Callable[[int], Any]:
        def forward_backward(i: int) -> tuple[Tensor, ...]:
            leaves = [tensor.detach().requires_grad_() for tensor in self.pick(i)]
            output = self.ways.call(*leaves, group=candidate.group, comm=candidate.backend)
            return torch.autograd.grad(output, leaves, self.output_grad)

        return forward_backward

    def _product_alone(self, candidate: Candidate) -> list[Variant]:
        """That backend's GEMM of this rank, without partners."""
        product = self._product(candidate)
        if product is None:
            self.session.leave_out(f"{candidate.backend} compute_alone", "it has no GEMM to time alone")
            return []
        input = self._draw(self.sizes.product)
        factors = [GemmInputs(input, weight, None) for weight in self.weights]
        run = lambda i: product(factors[i % len(factors)])  # noqa: E731
        return [Variant(candidate.backend, "compute_alone", run, None, self.count)]

    def _product(self, candidate: Candidate) -> Callable[[GemmInputs], Tensor] | None:
        if candidate.backend == "baseline":
            return lambda gemm: F.linear(gemm.input, gemm.weight)
        if candidate.backend == "host":
            return self.ways.host_product
        module = importlib.import_module(f"fused_ops.backends.{candidate.backend}.{self.ways.operator}")
        return getattr(module, "local_product", None)


def _exchange(session: Session, shape: GemmShape, call: Call, candidate: Candidate) -> Callable[[int], Tensor]:
    """The operator where its product is of no terms, or of no columns: what is left of it is the exchange."""
    dtype, sizes = TORCH_DTYPES[shape.dtype], shape.sizes(session.rank, session.world)
    input, weight = (torch.randn(size, device=session.device).to(dtype) for size in sizes.exchanged)
    return lambda i: call(input, weight, group=candidate.group, comm=candidate.backend)
