"""What every scenario of the stress test stands on: the content rule, one checked exchange, the count of mismatches.

Expected values come from the rule alone, which every rank evaluates for itself: never from another collective.
Comparisons stay on the device until the end, so that calls really follow one another without a pause.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops.symmetric.group import context, group_name

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LARGEST_EXACT = {
    torch.float32: 23,
    torch.complex64: 23,
    torch.float64: 40,
    torch.int64: 40,
    torch.int32: 30,
    torch.bool: 1,
}


def content(
    source: int, destination: int, call: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What `source` sends to `destination` in `call`: integers that the dtype holds exactly, no two calls alike."""
    count = torch.Size(shape).numel()
    salt = (source * 1_000_003 + destination * 7_919 + call * 104_729 + 1) * 40_503
    mixed = torch.arange(count, device=device) * 2_654_435_761 + salt
    mask = (1 << LARGEST_EXACT.get(dtype, 7)) - 1
    return (mixed.bitwise_xor(mixed >> 15) & mask).reshape(tuple(shape)).to(dtype)


@dataclass
class Layout:
    """One call's shape, the same on every rank; `table[source][destination]` rows, even when `even`."""

    table: list[list[int]]
    trailing: tuple[int, ...]
    dtype: torch.dtype
    even: bool

    @classmethod
    def draw(cls, rng: random.Random, world: int, largest_elements: int = 2000) -> Layout:
        trailing = tuple(rng.choice([1, 2, 3, 8, 33]) for _ in range(rng.randrange(4)))
        if rng.random() < 0.03:
            trailing = (*trailing, 0)
        rows = max(1, largest_elements // max(1, torch.Size(trailing).numel()))
        even = rng.random() < 0.5
        count = rng.choice([0, 1, rng.randint(0, rows), rows])
        draw = (lambda: count) if even else (lambda: rng.choice([0, 0, 1, rng.randint(0, rows)]))
        return cls([[draw() for _ in range(world)] for _ in range(world)], trailing, rng.choice(DTYPES), even)

    @classmethod
    def plain(cls, world: int, rows: int, width: int = 4, dtype: torch.dtype = torch.float32) -> Layout:
        return cls([[rows] * world for _ in range(world)], (width,), dtype, True)


@dataclass
class Lab:
    device: torch.device
    calls: int
    seed: int
    timeout_s: float
    nccl: bool = False
    backend: str = ""  # of the operator under test; "" is the native one
    rank: int = field(default_factory=dist.get_rank)
    world: int = field(default_factory=dist.get_world_size)
    checked: int = 0

    def __post_init__(self) -> None:
        self.mismatches = torch.zeros((), dtype=torch.int64, device=self.device)
        fused_ops.set_timeout(self.timeout_s)
        if self.nccl:
            self._nccl_stream = torch.cuda.Stream(self.device)
            self._nccl_data = torch.empty(4 << 20, device=self.device)
            self._nccl_wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def comm(self) -> str:
        return "host" if self.device.type == "cpu" else self.device.type

    def rng(self, what: object = "") -> random.Random:
        """The same on every rank."""
        return random.Random(f"{self.seed}/{what}")

    def send(
        self,
        layout: Layout,
        call: int,
        group: dist.ProcessGroup | None = None,
        channel: int = 0,
        requires_grad: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(input, output, what the output must be) of one call."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        shapes = [[(layout.table[s][d], *layout.trailing) for d in range(world)] for s in range(world)]
        input = torch.cat([content(rank, d, call, shapes[rank][d], layout.dtype, self.device) for d in range(world)])
        expected = torch.cat([content(s, rank, call, shapes[s][rank], layout.dtype, self.device) for s in range(world)])
        input.requires_grad_(requires_grad)
        splits: dict[str, Any] = {}
        if not layout.even:
            splits["input_splits"] = layout.table[rank]
            splits["output_splits"] = [layout.table[s][rank] for s in range(world)]
        output = fused_ops.all_to_all(input, group=group, channel=channel, comm=self.comm, **splits)
        if self.nccl and call % 4 == 0 and world == self.world:  # a collective of all ranks
            self._run_nccl()
        return input, output, expected

    def check(self, output: Tensor, expected: Tensor) -> None:
        """Count mismatches without waiting for the device."""
        assert output.shape == expected.shape, f"got shape {tuple(output.shape)}, expected {tuple(expected.shape)}"
        assert output.dtype == expected.dtype, f"got {output.dtype}, expected {expected.dtype}"
        self.mismatches += (output != expected).sum()
        self.checked += 1

    def exchange(self, layout: Layout, call: int, **options) -> None:
        """One checked call whose output is poisoned afterwards: the slot's next user must overwrite every byte."""
        _, output, expected = self.send(layout, call, **options)
        self.check(output, expected)
        output.fill_(True if layout.dtype == torch.bool else 99)

    def fails(self, kinds: type[Exception] | tuple[type[Exception], ...], issue: Callable[[], object]) -> Exception:
        """The error of one call: at once on a host, at the latest in check_errors on a device."""
        try:
            issue()
            self.synchronize()
            fused_ops.check_errors()
        except kinds as error:
            return error
        raise AssertionError(f"rank {self.rank}: expected {kinds}, but the call went through")

    def set_stress_delay(self, max_us: int, group: dist.ProcessGroup | None = None) -> None:
        for channel in context(group_name(group)).channels():
            channel.set_stress_delay(max_us, self.seed + self.rank)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        """Every comparison made so far held, and there were some."""
        self.synchronize()
        fused_ops.check_errors()
        wrong = int(self.mismatches)
        assert wrong == 0, (
            f"rank {self.rank}: {wrong} wrong elements in {self.checked} checked calls (seed {self.seed})"
        )
        assert self.checked > 0, "nothing was checked"
        if self.nccl:
            assert int(self._nccl_wrong) == 0, f"rank {self.rank}: the NCCL all-reduces alongside came out wrong"

    def pause(self, rng: random.Random, longest_s: float) -> None:
        time.sleep(rng.random() * longest_s)

    def _run_nccl(self) -> None:
        with torch.cuda.stream(self._nccl_stream):
            self._nccl_data.fill_(self.rank + 1)
            dist.all_reduce(self._nccl_data)
            self._nccl_wrong += (self._nccl_data != self.world * (self.world + 1) // 2).sum()


def memory_bytes() -> int:
    return sum(row["bytes"] for row in fused_ops.memory_report())
