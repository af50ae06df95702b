"""Tensors wherever they lie as one flat tensor and offsets into it, which is how FBGEMM takes the tables of one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.symmetric.device_lease import lend


def address_range(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """(a 1-D tensor from the lowest address of `tensors` to their highest end, where in it each of them starts).

    They are contiguous, of one dtype and on one device. The range owns nothing, and what lies between the tensors is not
    theirs: it is good for kernels that read and write at the offsets, for as long as the tensors live.
    """
    placed = [t for t in tensors if t.numel()]
    if not placed:
        return tensors[0].new_empty(0), [0] * len(tensors)
    low = min(t.data_ptr() for t in placed)
    high = max(t.data_ptr() + t.nbytes for t in placed)
    dtype, device = placed[0].dtype, placed[0].device
    flat = _flat(low, high - low, dtype, device)
    return flat, [(t.data_ptr() - low) // dtype.itemsize if t.numel() else 0 for t in tensors]


@functools.lru_cache(maxsize=256)  # a view of addresses, whoever owns them now
def _flat(address: int, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=dtype)
    flat = lend(None, address, nbytes, device).view(dtype)
    assert flat.data_ptr() == address, "a copy of the range instead of the range"
    return flat
