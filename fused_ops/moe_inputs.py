"""What the two operators of Mixture of Experts share: which rows go to which expert, checked, and where experts live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.gemm_inputs import check_tensors


@dataclass(frozen=True)
class Routing:
    """One rank's routed rows, sorted by expert: the token of each, and how many each expert gets, checked.

    tokens: [R] int64, contiguous; counts: of all E experts, of which rank r has those from r * E / world on.
    """

    tokens: Tensor
    counts: tuple[int, ...]
    world: int

    @classmethod
    def checked(
        cls, operator: str, tokens: Tensor, counts: Tensor, num_tokens: int, device: torch.device, world: int
    ) -> Routing:
        """Raises ValueError for what this rank alone can see. `device`: where the tokens must be; counts may be on the CPU."""
        values = check_counts(operator, counts, device, world)
        _check_indices(operator, "tokens", tokens)
        if tokens.device != device:
            raise ValueError(f"{operator}: input is on {device}, but tokens on {tokens.device}")
        if num_tokens < 0:
            raise ValueError(f"{operator}: num_tokens must not be negative, got {num_tokens}")
        rows = tokens.shape[0]
        if sum(values) != rows:
            raise ValueError(f"{operator}: counts sum to {sum(values)}, but tokens has {rows} rows")
        if rows:
            lowest, highest = torch.stack(tokens.aminmax()).tolist()
            if not 0 <= lowest <= highest < num_tokens:
                raise ValueError(f"{operator}: tokens must lie in [0, {num_tokens}), got {lowest} to {highest}")
        return cls(tokens.contiguous(), tuple(values), world)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def local_experts(self) -> int:
        return len(self.counts) // self.world

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """How many rows each expert of that rank gets."""
        return self.counts[rank * self.local_experts : (rank + 1) * self.local_experts]

    @property
    def rows_of_ranks(self) -> list[int]:
        """How many rows each rank's experts get."""
        return [sum(self.of_rank(rank)) for rank in range(self.world)]


def check_counts(operator: str, counts: Tensor, device: torch.device, world: int) -> list[int]:
    """How many rows each expert gets, or ValueError. `device`: where counts may be, beside the CPU."""
    _check_indices(operator, "counts", counts)
    if counts.device != device and counts.device.type != "cpu":
        raise ValueError(f"{operator}: counts must be on {device} or the CPU, got {counts.device}")
    experts = counts.shape[0]
    if experts == 0 or experts % world:
        raise ValueError(f"{operator}: {experts} experts (the length of counts) do not divide over {world} ranks")
    values = counts.tolist()
    if min(values) < 0:
        raise ValueError(f"{operator}: counts must not be negative, got {values}")
    return values


def _check_indices(operator: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.layout != torch.strided:
        raise ValueError(
            f"{operator}: {name} must be one dimension of torch.int64, got {tuple(tensor.shape)} of {tensor.dtype}"
        )


def check_experts(operator: str, input: Tensor, weight: Tensor, routing: Routing) -> None:
    """ValueError unless input is [rows, K] and weight holds a matrix [N, K] for each expert of this rank."""
    check_tensors(operator, {"input": input, "weight": weight})
    if input.dim() != 2:
        raise ValueError(f"{operator}: input must be [rows, K], got {tuple(input.shape)}")
    if weight.dim() != 3 or weight.shape[0] != routing.local_experts or weight.shape[2] != input.shape[1]:
        raise ValueError(
            f"{operator}: weight must be [{routing.local_experts}, N, {input.shape[1]}] for {len(routing.counts)} experts on "
            f"{routing.world} ranks and input {tuple(input.shape)}, got {tuple(weight.shape)}"
        )


def check_received(operator: str, received: Tensor, rows: int, local_experts: int, world: int) -> list[list[int]]:
    """How many of the input's rows each expert of this rank has from each rank, or ValueError."""
    wanted = (local_experts, world)
    if received.dtype != torch.int64 or tuple(received.shape) != wanted:
        raise ValueError(
            f"{operator}: received must be {list(wanted)} of torch.int64, got {tuple(received.shape)} of {received.dtype}"
        )
    numbers = received.tolist()
    total = sum(sum(of_expert) for of_expert in numbers)
    if any(number < 0 for of_expert in numbers for number in of_expert) or total != rows:
        raise ValueError(f"{operator}: received must sum to the input's {rows} rows, none negative; it sums to {total}")
    return numbers


def check_gates(operator: str, gates: Tensor, routing: Routing, input: Tensor) -> None:
    if gates.dtype not in (torch.float32, input.dtype) or tuple(gates.shape) != (routing.rows,):
        raise ValueError(
            f"{operator}: gates must be [{routing.rows}] of torch.float32 or {input.dtype}, got {tuple(gates.shape)} of "
            f"{gates.dtype}"
        )
    if gates.device != input.device:
        raise ValueError(f"{operator}: input is on {input.device}, but gates on {gates.device}")


def first_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where each piece begins, pieces lying one behind the other in the order of the nested lists."""
    firsts: list[list[int]] = []
    at = 0
    for of_one in rows:
        firsts.append([])
        for count in of_one:
            firsts[-1].append(at)
            at += count
    return firsts
