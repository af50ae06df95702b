"""Tensors over a piece of device memory that somebody lends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class _Lease:
    """What a tensor's storage keeps alive for as long as it views the memory, and with it its owner."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def lend(
    owner: object, address: int, nbytes: int, device: torch.device, returned: Callable[[], None] | None = None
) -> torch.Tensor:
    """A byte tensor [nbytes] over device memory at `address`. `owner` lives as long as the tensor's storage does; `returned` is
    called when that dies."""
    lease = _Lease(owner, address, nbytes)
    if returned is not None:
        weakref.finalize(lease, returned).atexit = False
    return torch.as_tensor(lease, device=device)
