"""What the GEMM operators of the host backend share: products stored where they are needed, one call's slices, and sums.

A product is torch's (MKL), written straight into shared memory; of few rows it is a native kernel that reads the weights once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.gemm_inputs import GemmInputs, split_evenly, starts
from fused_ops.symmetric.agreement import Result, library
from fused_ops.symmetric.host_channel import HostChannel, Incoming

FEW_ROWS = 32  # up to here the native kernel is faster than MKL
FEW_ROWS_OF_A_PART = 256  # up to here products of parts of the rows cost more than a copy
CONVERTED_ROWS = 512  # of a 16-bit weight, made float32 at a time
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class Part:
    """A block of the output [M, N]: `rows` from `first_row` on, `columns` from `first_column` on."""

    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def offset(self, total_columns: int) -> int:
        """Of its first element in the contiguous output."""
        return self.first_row * total_columns + self.first_column


def takes_few_rows(gemm: GemmInputs) -> bool:
    """Whether the native kernel for few rows computes this product."""
    return gemm.rows <= FEW_ROWS and gemm.weight.stride(1) == 1


def linear(gemm: GemmInputs) -> Tensor:
    """input @ weight^T + bias in input's dtype, by the fastest means. Of one rank, without partial sums."""
    if gemm.dtype != torch.float32 or not takes_few_rows(gemm):
        return F.linear(gemm.input, gemm.weight, gemm.bias)
    output = Product(gemm).whole()
    return output if gemm.bias is None else output.add_(gemm.bias)


def store_linear(gemm: GemmInputs, out: Tensor) -> None:
    """As `linear`, without a bias, into `out`: [M, N], contiguous."""
    if gemm.dtype == torch.float32 and takes_few_rows(gemm):
        Product(gemm).store(Part(0, gemm.rows, 0, gemm.columns), out.data_ptr())
    elif out.numel():
        torch.mm(gemm.input, gemm.weight.t(), out=out)


def takes_pieces(rows: Sequence[int]) -> bool:
    """Whether a product of so many rows for, or from, each rank is computed a rank at a time: where they are many."""
    return sum(rows) > len(rows) * FEW_ROWS_OF_A_PART


class ComputedProduct:
    """A product that is there as a whole: [M, N], float32, contiguous."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def store(self, part: Part, address: int | None) -> None:
        """The part's elements, packed, at `address` (None where it is empty). Of parts that are whole rows."""
        if part.numel:
            assert address
            ctypes.memmove(address, self._whole[part.first_row].data_ptr(), 4 * part.numel)


class Product:
    """input @ weight^T of one rank in float32, a part at a time."""

    def __init__(self, gemm: GemmInputs) -> None:
        self._weight = gemm.weight
        self._input = gemm.input.float()
        self._few_rows = takes_few_rows(gemm)
        if self._few_rows:
            self._input = self._input.contiguous()

    def computed(self) -> ComputedProduct:
        """All of it at once."""
        return ComputedProduct(self.whole())

    def whole(self) -> Tensor:
        """All of it: [M, N], contiguous."""
        output = torch.empty(self._input.shape[0], self._weight.shape[0])
        self.store(Part(0, output.shape[0], 0, output.shape[1]), output.data_ptr())
        return output

    def store(self, part: Part, address: int | None) -> None:
        """The part's elements, packed, at `address` (None where it is empty)."""
        if not part.numel:
            return
        assert address
        input = self._input[part.first_row : part.first_row + part.rows]
        weight = self._weight[part.first_column : part.first_column + part.columns]
        if self._few_rows:
            library().fo_gemm_few_rows(
                DTYPE_CODES[weight.dtype],
                ctypes.c_void_p(input.data_ptr()),
                ctypes.c_void_p(weight.data_ptr()),
                ctypes.c_int64(weight.stride(0)),
                ctypes.c_int64(part.rows),
                ctypes.c_int64(part.columns),
                ctypes.c_int64(weight.shape[1]),
                ctypes.c_void_p(address),
            )
            return
        out = tensor_at(address, part.rows, part.columns, torch.float32)
        if weight.dtype == torch.float32:
            torch.mm(input, weight.t(), out=out)
            return
        for first in range(0, part.columns, CONVERTED_ROWS):
            some = weight[first : first + CONVERTED_ROWS].float()
            torch.mm(input, some.t(), out=out[:, first : first + CONVERTED_ROWS])


def tensor_at(address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor over memory that somebody else keeps alive."""
    if not rows * columns:
        return torch.empty(rows, columns, dtype=dtype)
    memory = (ctypes.c_byte * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


class PartialSums(ctypes.Structure):
    """Partial sums [sources, rows, columns] in float32 and what becomes of them; the C++ struct of that name."""

    _fields_ = [
        ("partials", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("sources", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, address: int, bias: Tensor | None, part: Part, sources: int, dtype: torch.dtype) -> PartialSums:
        """`bias`: of the part's columns, contiguous; the caller keeps it alive."""
        return cls(
            address, None if bias is None else bias.data_ptr(), part.rows, part.columns, sources, DTYPE_CODES[dtype]
        )


class Slices:
    """The slices of one call on a channel, inside its `lane.receive`."""

    def __init__(self, lane: HostChannel, call: int, tag: int) -> None:
        self._lane = lane
        self._call, self._tag = ctypes.c_int64(call), ctypes.c_uint32(tag)

    def native(self, function: Any, *arguments: Any) -> Any:
        """function(handle, call, tag, *arguments, result), and what went wrong in it as an exception."""
        result = Result()
        returned = function(self._lane.handle, self._call, self._tag, *arguments, ctypes.byref(result))
        self._lane.finish(result)
        return returned

    def destination(self, peer: int, size: int) -> int | None:
        """Where this rank's `size` bytes go in the peer's memory; waits for its credit. None where they are none."""
        result = Result()
        address = _wait_credit()(
            self._lane.handle, peer, self._call, self._tag, ctypes.c_int64(size), ctypes.byref(result)
        )
        self._lane.finish(result)
        return address

    def signal(self, peer: int) -> None:
        """The slice for that peer is stored."""
        library().fo_gemm_signal(self._lane.handle, peer, self._call, self._tag)

    def wait_for(self, source: int) -> None:
        """Until the slice of that peer is in."""
        self.native(library().fo_gemm_wait_for, ctypes.c_int32(source))

    def wait(self) -> None:
        """Until every peer's slice is in."""
        self.native(library().fo_gemm_wait)


@functools.cache
def _wait_credit() -> Any:
    function = library().fo_gemm_wait_credit
    function.restype = ctypes.c_void_p
    return function


def others(lane: HostChannel) -> list[int]:
    """The ranks behind this one first, so that not all store to the same peer."""
    return [(lane.rank + step) % lane.world for step in range(1, lane.world)]


def row_parts(rows: int, columns: int, world: int) -> tuple[Part, ...]:
    """Whole rows, as `split_evenly` splits them."""
    sizes = split_evenly(rows, world)
    return tuple(Part(first, size, 0, columns) for first, size in zip(starts(sizes), sizes, strict=True))


def send_partials(lane: HostChannel, slices: Slices, gemm: GemmInputs, parts: Sequence[Part], own: int) -> None:
    """Compute this rank's partial sums of all parts: those of other owners first, each straight into its owner's memory, and
    the part of this rank at `own` (an address)."""
    at_once = parts[0].rows < gemm.rows <= lane.world * FEW_ROWS_OF_A_PART
    product = Product(gemm).computed() if at_once else Product(gemm)
    for owner in others(lane):
        product.store(parts[owner], slices.destination(owner, 4 * parts[owner].numel))
        slices.signal(owner)
    product.store(parts[lane.rank], own)


def gather_rows(lane: HostChannel, call: int, tag: int, mine: Tensor, sizes: list[int]) -> Tensor:
    """All ranks' rows, of which each rank has as many as `sizes` says."""
    row_bytes = mine.shape[1] * mine.element_size()
    incoming = Incoming.packed([rows * row_bytes for rows in sizes])
    mine = mine.contiguous()
    with lane.receive(tag, incoming) as receipt:
        Slices(lane, call, tag).native(
            library().fo_gemm_gather,
            ctypes.c_void_p(mine.data_ptr()),
            ctypes.c_int64(incoming.bytes[lane.rank]),
            ctypes.c_void_p(receipt.address + incoming.offsets[lane.rank]),
        )
        return receipt.tensor((sum(sizes), mine.shape[1]), mine.dtype)
