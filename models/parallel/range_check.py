"""Token, target and position ids that lie outside their table."""

from __future__ import annotations

import torch
from torch import Tensor


def outside(values: Tensor, limit: int, what: str, ignored: int | None = None) -> Tensor:
    """Where `values` are not in [0, limit), nor `ignored`.

    On the CPU any such value is a ValueError. A device cannot be asked without waiting for it, nor can a compiler: there the
    caller turns what comes of those values into NaN.
    """
    bad = (values < 0) | (values >= limit)
    if ignored is not None:
        bad &= values != ignored
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and bool(bad.any()):
        also = "" if ignored is None else f", and not {ignored}"
        raise ValueError(f"{what} {int(values[bad][0])} is outside [0, {limit}){also}")
    return bad
