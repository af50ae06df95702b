"""One rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainers.data.layout import CAT_KEYS


@dataclass
class Batch:
    """B samples; B may be 0.

    dense   float32 [B, num_dense]
    sparse  keys cat_0 .. cat_<F-1>, stride B; values int64, feature-major; lengths int32 [F * B]
    labels  float32 [B], 0 or 1
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(torch.device(device), non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Its memory is in use by that stream too."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)


def cat_keys(num_features: int) -> list[str]:
    """cat_0 .. cat_<num_features - 1>."""
    return list(CAT_KEYS[:num_features]) + [f"cat_{i}" for i in range(len(CAT_KEYS), num_features)]


def make_batch(dense: np.ndarray, ids: list[np.ndarray], labels: np.ndarray) -> Batch:
    """From dense [B, D], a feature's ids [B, hot_i] each, labels [B]; everything is copied."""
    size = len(labels)
    per_key = [array.size for array in ids]
    values = np.empty(sum(per_key), np.int64)
    start = 0
    for array, number in zip(ids, per_key, strict=True):
        values[start : start + number] = array.reshape(-1)
        start += number
    lengths = torch.tensor([array.shape[1] for array in ids], dtype=torch.int32).repeat_interleave(size)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    sparse = KeyedJaggedTensor(
        keys=cat_keys(len(ids)),
        values=torch.from_numpy(values),
        lengths=lengths,
        offsets=offsets,
        stride=size,
        length_per_key=per_key,
        offset_per_key=[0, *np.cumsum(per_key).tolist()],
    )
    return Batch(
        torch.from_numpy(np.array(dense, np.float32)),
        sparse,
        torch.from_numpy(np.array(labels, np.float32).reshape(-1)),
    )
