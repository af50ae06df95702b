"""Calls of GEMM + AllReduce on emulated ranks, each against float64."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from fused_ops.backends.cuda import gemm_all_reduce as backend
from fused_ops.symmetric import packet_memory
from tests.emulator.channel import EmulatedChannel, World, together

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("rows", "columns", "strided", "misaligned")


@dataclass(frozen=True)
class Problem:
    """input_r [rows, inner[r]], weight_r [columns, inner[r]] in memory as `layouts[r]` says."""

    rows: int
    columns: int
    inner: tuple[int, ...]
    layouts: tuple[str, ...]
    dtype: torch.dtype
    has_bias: bool
    seed: int

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(100 * self.seed + rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        bias = torch.randn(self.columns, generator=torch.Generator().manual_seed(self.seed)).to(self.dtype)
        weight = in_memory(draw(self.columns, self.inner[rank]), self.layouts[rank])
        return draw(self.rows, self.inner[rank]), weight, bias if self.has_bias else None

    def check(self, outputs: list[Tensor]) -> None:
        whole = torch.zeros(self.rows, self.columns, dtype=torch.float64)
        scale = torch.zeros_like(whole)
        for rank in range(len(self.inner)):
            input, weight, bias = self.inputs(rank)
            whole += input.double() @ weight.double().t()
            scale += input.double().abs() @ weight.double().abs().t()
        if bias is not None:
            whole, scale = whole + bias.double(), scale + bias.double().abs()
        rounding = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[self.dtype]
        for rank, output in enumerate(outputs):
            assert output.dtype == self.dtype
            error = (output.double() - whole).abs()
            allowed = rounding * whole.abs() + 2.0**-20 * scale + 1e-7
            assert (error <= allowed).all(), f"{self}: rank {rank} is off by {(error - allowed).max():.3g} too much"
            assert torch.equal(output, outputs[0]), f"{self}: ranks {rank} and 0 differ"


def in_memory(weight: Tensor, layout: str) -> Tensor:
    columns, inner = weight.shape
    if layout == "columns":
        return weight.t().contiguous().t()
    if layout == "strided":
        wide = torch.full((2 * columns, 3 * inner), float("nan"), dtype=weight.dtype)
        wide[::2, ::3] = weight
        return wide[::2, ::3]
    if layout == "misaligned":
        shifted = torch.full((columns * inner + 1,), float("nan"), dtype=weight.dtype)
        shifted[1:] = weight.flatten()
        return shifted[1:].view(columns, inner)
    return weight.contiguous()


def draw(ranks: int, count: int, seed: int) -> Iterator[Problem]:
    """Every dtype and layout; few rows and many; inner dimensions that no vector divides, and empty ones."""
    chance = random.Random(seed)
    kinds = list(itertools.product(DTYPES, LAYOUTS))
    for number in range(count):
        dtype, layout = kinds[number % len(kinds)]
        rows = chance.choice([1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64])
        columns = chance.choice([1, 3, 7, 8, 24, 64, 72, 96, 136, 201])
        inner = tuple(chance.choice([0, 1, 5, 8, 40, 64, 72, 130, 192]) for _ in range(ranks))
        yield Problem(rows, columns, inner, (layout,) * ranks, dtype, bool(chance.getrandbits(1)), number)


def channels(ranks: int, link: str, timeout_s: float = 60.0) -> list[EmulatedChannel]:
    world = World(ranks, link)
    return [EmulatedChannel(world, rank, timeout_s) for rank in range(ranks)]


class Packets:
    """The packet memory of all ranks, two halves of exactly `half_bytes` or, without that, of what the largest call needs."""

    def __init__(self, ranks: int, half_bytes: int = 0) -> None:
        self._ranks, self._half_bytes = ranks, half_bytes
        self._memories: list[Tensor] = []
        self._outgrown: list[Tensor] = []

    def __call__(self, nbytes: int) -> packet_memory.Packets:
        if not self._memories or self._half_bytes < nbytes:
            self._outgrown += self._memories  # calls in flight
            self._half_bytes = max(nbytes, self._half_bytes)
            self._memories = [torch.zeros(2 * self._half_bytes, dtype=torch.uint8) for _ in range(self._ranks)]
        return packet_memory.Packets([memory.data_ptr() for memory in self._memories], self._half_bytes)


@contextlib.contextmanager
def gemm_backend(
    lanes: list[EmulatedChannel],
    one_phase_bytes: int,
    more_lanes: list[EmulatedChannel] | None = None,
    half_bytes: int = 0,
) -> Iterator[None]:
    """The CUDA module works with these channels, by rank: number 0, and 1 where there are more."""
    of_channel = [lanes, *([more_lanes] if more_lanes else [])]
    packets = [Packets(len(lanes), half_bytes) for _ in of_channel]
    where = "fused_ops.backends.cuda.gemm_all_reduce"
    patches = {
        f"{where}.cuda_channel": lambda group, index, device: of_channel[index][group.rank],
        f"{where}.packet_memory": lambda lane, nbytes: packets[lane in (more_lanes or [])](nbytes),
        f"{where}.load_kernels": lambda device_index: None,
        f"{where}.ONE_PHASE_BYTES": dict.fromkeys(("peer", "pinned"), one_phase_bytes),
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.device": lambda device: contextlib.nullcontext(),
    }
    backend.plan.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(mock.patch(name, replacement))
        yield
    backend.plan.cache_clear()


def run(
    problem: Problem,
    lanes: list[EmulatedChannel],
    ranks: int | None = None,
    check: bool = True,
    culprit: int | None = None,
    instead: dict[int, Problem] | None = None,
) -> list[Tensor]:
    """Outputs of the first `ranks` ranks, who alone call; of which `culprit` rejects, and some may have another problem."""
    ranks = len(lanes) if ranks is None else ranks
    inputs = [(instead or {}).get(rank, problem).inputs(rank) for rank in range(ranks)]

    def issue(r: int) -> Tensor:
        if r != culprit:
            return backend.gemm_all_reduce(*inputs[r], lanes[r].group, 0)  # type: ignore[arg-type]
        with lanes[r].call("gemm_all_reduce"):
            lanes[r]._reject()
        return torch.empty(0)

    outputs = together(issue, ranks)
    if check:
        no_failure(lanes)
    return outputs


def no_failure(lanes: list[EmulatedChannel]) -> None:
    for lane in lanes:
        record = lane.record
        assert record.serial == 0, f"rank {lane.rank}: code {record.code}, phase {record.phase}, peer {record.peer}"
