"""How the GEMM kernels read a matrix: through a TMA descriptor, copied first where its strides allow none.

A descriptor wants rows or columns that lie together, start on 16 bytes and follow one another in steps of 16 bytes. A
transposed matrix has such columns: its descriptor is that of the layout in memory, and blocks are transposed on the way to the
tensor cores. Any other matrix is copied: that moves its bytes twice, while narrow loads would slow down the whole product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_ops.backends.triton.link import INTERPRETED

TMA_BYTES = 16  # of which addresses and steps are multiples


@dataclass(frozen=True)
class Operand:
    """A factor [outer, inner] of a product, as a kernel takes it."""

    descriptor: TensorDescriptor
    is_transposed: bool  # the descriptor is that of [inner, outer]

    @classmethod
    def of(cls, matrix: Tensor, outer_block: int, inner_block: int) -> Operand:
        """`outer_block`, `inner_block`: what a kernel takes of it at a time."""
        if not matrix.numel():
            matrix = matrix.new_zeros(1, padded(1, matrix.dtype))  # never read
        if not has_descriptor(matrix) and has_descriptor(matrix.t()):
            return cls(TensorDescriptor.from_tensor(matrix.t(), [inner_block, outer_block]), True)
        if not has_descriptor(matrix):
            matrix = aligned_copy(matrix)
        return cls(TensorDescriptor.from_tensor(matrix, [outer_block, inner_block]), False)

    def arguments(self, name: str) -> dict[str, Any]:
        """Of a kernel whose parameter for this operand is called that."""
        return {name: self.descriptor, f"{name.upper()}_TRANSPOSED": self.is_transposed}


def has_descriptor(matrix: Tensor) -> bool:
    columns, (step, last_stride) = matrix.shape[1], matrix.stride()
    return (
        last_stride == 1
        and step >= columns
        and step * matrix.element_size() % TMA_BYTES == 0
        and matrix.data_ptr() % TMA_BYTES == 0
    )


def padded(columns: int, dtype: torch.dtype) -> int:
    """The least width of at least `columns` at which every row starts on 16 bytes."""
    each = TMA_BYTES // dtype.itemsize
    return -(-columns // each) * each


def aligned_copy(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return matrix.new_empty(rows, padded(columns, matrix.dtype))[:, :columns].copy_(matrix)


@triton.jit
def block_of_operand(source, first, inner_first, TRANSPOSED: tl.constexpr):
    """[outer block, inner block] from row `first` and column `inner_first` on, zeros beyond the matrix."""
    if TRANSPOSED:
        return source.load([inner_first, first]).T
    else:
        return source.load([first, inner_first])


@triton.jit
def product(
    a, b, first_row, first_column, inner,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of a @ b^T in fp32, a [rows, inner], b [columns, inner]."""
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for step in range((inner + BLOCK_K - 1) // BLOCK_K):
        left = block_of_operand(a, first_row, step * BLOCK_K, A_TRANSPOSED)
        right = block_of_operand(b, first_column, step * BLOCK_K, B_TRANSPOSED)
        if INTERPRETED:  # which takes the bits of bfloat16 for integers here
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right.T, total, input_precision=PRECISION)
    return total
