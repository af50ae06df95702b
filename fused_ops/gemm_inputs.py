"""What the GEMM operators' backends share: checked inputs, and how rows or columns are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GemmInputs:
    """One rank's factors of input @ weight^T + bias, checked.

    input: [rows, inner]; weight: [columns, inner], any strides; bias: [columns] or None; all of one dtype and device.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def checked(
        cls, operator: str, input: Tensor, weight: Tensor, bias: Tensor | None, leading: bool = False
    ) -> GemmInputs:
        """Raises ValueError for what this rank alone can see. `leading`: input may have any number of leading dimensions,
        which become rows."""
        tensors = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
        check_tensors(operator, tensors)
        shape = tuple(input.shape)
        if input.dim() == 0 or (input.dim() != 2 and not leading):
            wanted = "[..., K]" if leading else "[M, K]"
            raise ValueError(f"{operator}: input must be {wanted}, got {shape}")
        if weight.dim() != 2 or weight.shape[1] != shape[-1]:
            raise ValueError(
                f"{operator}: weight must be [N, {shape[-1]}] for input {shape}, got {tuple(weight.shape)}"
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"{operator}: bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
        return cls(input.reshape(math.prod(shape[:-1]), shape[-1]), weight, bias)

    @property
    def rows(self) -> int:
        return self.input.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.input.dtype


def check_tensors(operator: str, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless all are plain tensors of one dtype that the operators take, on one device."""
    first, input = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
            raise ValueError(f"{operator}: {name} must be a plain strided tensor, got {kind} one")
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"{operator}: {name} must be one of {allowed}, got {tensor.dtype}")
        if tensor.dtype != input.dtype:
            raise ValueError(f"{operator}: {first} is {input.dtype}, but {name} is {tensor.dtype}; they must be equal")
        if tensor.device != input.device:
            raise ValueError(f"{operator}: {first} is on {input.device}, but {name} on {tensor.device}")


def in_own_dtype(device: torch.device) -> torch.autocast:
    """Autocast off: what an operator computes, sends and returns is of its inputs' dtype, on every backend and in a trace."""
    return torch.autocast(device.type, enabled=False)


def check_one_device(operator: str, **tensors: Tensor | None) -> None:
    """For fake kernels, which alone run where one tensor is on the meta device. ValueError unless all are on one device."""
    given = [(name, tensor.device) for name, tensor in tensors.items() if tensor is not None]
    for name, device in given:
        if device != given[0][1]:
            raise ValueError(f"{operator}: {given[0][0]} is on {given[0][1]}, but {name} on {device}")


def unflattened(output: Tensor, input: Tensor) -> Tensor:
    """[rows, columns] with input's leading dimensions; no view to autograd, so that the caller may change it in place."""
    return torch.ops.aten._unsafe_view(output, (*input.shape[:-1], output.shape[-1]))


def split_evenly(total: int, world: int) -> list[int]:
    """How many of `total` each rank has: as even as whole ones allow, the first `total % world` ranks one more."""
    return [total // world + (rank < total % world) for rank in range(world)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each rank's part begins, parts lying one behind the other."""
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def check_total_rows(operator: str, rows: int, total_rows: int, world: int, rank: int) -> None:
    """ValueError unless `rows` is what `split_evenly` gives this rank of `total_rows`."""
    if total_rows < 0:
        raise ValueError(f"{operator}: total_rows must not be negative, got {total_rows}")
    sizes = split_evenly(total_rows, world)
    if rows != sizes[rank]:
        raise ValueError(
            f"{operator}: of {total_rows} rows rank {rank} of {world} has {sizes[rank]}, but its input has {rows}"
        )


def agreed_total(operator: str, rows_of_ranks: Sequence[int]) -> int:
    """All rows, or ValueError (on every rank alike) where they are not split as `split_evenly` does."""
    total, world = sum(rows_of_ranks), len(rows_of_ranks)
    if list(rows_of_ranks) != split_evenly(total, world):
        raise ValueError(
            f"{operator}: ranks have {list(rows_of_ranks)} rows, but {total} rows over {world} ranks must be split "
            f"{split_evenly(total, world)}"
        )
    return total
