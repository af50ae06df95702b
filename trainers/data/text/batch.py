"""One rank's part of a global batch of text."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from trainers.data.text.packing import IGNORED, Sample


@dataclass
class TextBatch:
    """b samples of `length` tokens; b may be 0.

    tokens     int64 [b, length]
    targets    int64 [b, length]: the token to predict at each place; -100 = ignored
    positions  int64 [b, length]: within the document, or the part of it in this sample
    documents  int32 [b, length]: ascending from 0 in each sample; a token may see earlier ones of its own number only
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def num_targets(self) -> torch.Tensor:
        """int64 []: targets that are not ignored, which a mean loss over ranks or batches is weighted with."""
        return (self.targets != IGNORED).sum()

    def cumulative_lengths(self) -> torch.Tensor:
        """int32 [k + 1]: where, in the b * length tokens laid end to end, the k documents of all samples begin, and the
        end; what attention over packed sequences takes (FlashAttention's `cu_seqlens`).
        """
        begins = (self.positions.flatten() == 0).nonzero().flatten()
        end = begins.new_full((1,), self.positions.numel())
        return torch.cat([begins, end]).to(torch.int32)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TextBatch:
        return TextBatch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def pin_memory(self) -> TextBatch:
        return TextBatch(*(part.pin_memory() for part in self._parts()))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Its memory is in use by that stream too."""
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> list[torch.Tensor]:
        return [getattr(self, part.name) for part in fields(self)]


def make_text_batch(samples: list[Sample], length: int) -> TextBatch:
    """From samples of `length`, which are copied."""

    def joined(name: str, dtype: type) -> torch.Tensor:
        rows = [getattr(sample, name) for sample in samples]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, length), dtype))

    return TextBatch(
        joined("tokens", np.int64),
        joined("targets", np.int64),
        joined("positions", np.int64),
        joined("documents", np.int32),
    )
