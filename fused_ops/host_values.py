"""What the host knows of small tensors on a device, so that a kernel that takes a number need not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(tensor: Tensor, value: float, announced_writes: int = 0) -> None:
    """`tensor`, of one element, holds `value` until it is next written to.

    announced_writes: what torch will count as writes before the next look, and is none: an operator whose schema says that it
    changes the tensor counts as one before it begins.
    """
    _known[tensor] = (tensor._version + announced_writes, value)


def host_value(tensor: Tensor, what: str) -> float:
    """The element of `tensor`: without a wait for the device where it is remembered and was not written to since.

    ValueError inside a CUDA graph capture, where a value that is not remembered cannot be read.
    """
    version, value = _known.get(tensor, (None, 0.0))
    if version == tensor._version:
        return value
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"FBGEMM takes {what} from the host, and it cannot be read from {tensor.device} inside a CUDA graph capture"
        )
    value = tensor.item()
    remember(tensor, value)
    return value


def clone(tensor: Tensor) -> Tensor:
    """A copy of which the host knows as much as of `tensor`."""
    copy = tensor.clone()
    version, value = _known.get(tensor, (None, 0.0))
    if version == tensor._version:
        remember(copy, value)
    return copy
