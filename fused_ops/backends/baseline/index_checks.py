"""Indices and offsets made safe for FBGEMM's device kernels, and what was wrong with them told without a wait.

FBGEMM's `bounds_check_indices` works on copies. It counts what it mends on the device; the count goes to pinned memory behind
the kernels, where the next call, or `fused_ops.check_errors()`, finds it. FBGEMM also prints the first one to stdout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque

import torch
from torch import Tensor

from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.backends.baseline.fbgemm_metadata import Features
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs
from fused_ops.symmetric.group import GroupContext

WARNING, IGNORE = 1, 2  # FBGEMM's BoundsCheckMode: mend and count, mend
REMEMBERED = 2  # calls whose indices are kept, to name what was wrong


class IndexChecks:
    """The checks of one group's calls on one device; a channel, so that `fused_ops.check_errors` asks it."""

    bytes = 0  # nothing that peers address

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_call = torch.zeros(1, dtype=torch.int64, device=device)
        self._mended = torch.zeros(1, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._told = 0
        self._recent: deque[EmbeddingInputs] = deque(maxlen=REMEMBERED)

    def set_timeout(self, seconds: float) -> None:
        """Nothing here waits."""

    def check_errors(self) -> None:
        """ValueError where a call since the last look had a bad index or offset."""
        mended = int(self._on_host)
        if mended == self._told:
            return
        found, self._told = mended - self._told, mended
        recent, self._recent = self._recent, deque(maxlen=REMEMBERED)
        for inputs in recent:
            Lookups(inputs)
        raise ValueError(
            f"{OPERATOR}: {found} indices or offsets were out of range on {self.device}; FBGEMM printed one"
        )

    def valid(self, inputs: EmbeddingInputs, features: Features) -> tuple[Tensor, Tensor]:
        """(indices, offsets): copies of one dtype, every index a row of its table. What is mended here is an error."""
        self.check_errors()
        indices, offsets = _copies(inputs, features)
        bounds_check = torch.ops.fbgemm.bounds_check_indices
        bounds_check(features.rows, indices, offsets, WARNING, self._of_call)
        self._mended.add_(self._of_call)
        self._on_host.copy_(self._mended, non_blocking=True)
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            tables = _without_memory(tuple(table.shape for table in inputs.tables))
            self._recent.append(dataclasses.replace(inputs, tables=tables, weights=None))
        return indices, offsets


def still_valid(inputs: EmbeddingInputs, features: Features) -> tuple[Tensor, Tensor]:
    """What `IndexChecks.valid` returned for these inputs, made again."""
    indices, offsets = _copies(inputs, features)
    bounds_check = torch.ops.fbgemm.bounds_check_indices
    bounds_check(features.rows, indices, offsets, IGNORE, torch.empty_like(features.rows[:1]))
    return indices, offsets


def index_checks(group: GroupContext, device: torch.device) -> IndexChecks:
    return group.channel(f"baseline {device}", 0, lambda group, index: IndexChecks(device))


@functools.lru_cache(maxsize=64)
def _without_memory(shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


def _copies(inputs: EmbeddingInputs, features: Features) -> tuple[Tensor, Tensor]:
    offsets = inputs.offsets.to(features.index_dtype, copy=True)
    indices = inputs.indices.to(features.index_dtype)
    if inputs.out_of_range == "error":
        # FBGEMM lets -1 pass, as a row that was pruned; without its sign it is above every row.
        return indices & torch.iinfo(indices.dtype).max, offsets
    rows = features.rows.to(indices.dtype).index_select(0, _features_of(indices, offsets, inputs))
    if inputs.out_of_range == "clamp":
        return torch.minimum(indices.clamp(min=0), rows - 1), offsets
    return torch.remainder(indices, rows), offsets


def _features_of(indices: Tensor, offsets: Tensor, inputs: EmbeddingInputs) -> Tensor:
    """[nnz]: the feature of each lookup, some feature where the offsets are wrong."""
    starts = offsets[inputs.layout.global_batch : -1 : inputs.layout.global_batch].contiguous()
    positions = torch.arange(indices.numel(), dtype=offsets.dtype, device=indices.device)
    return torch.bucketize(positions, starts, right=True)
