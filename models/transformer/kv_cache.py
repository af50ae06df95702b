"""Keys and values of the tokens seen so far, in memory allocated once."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Per layer: keys and values [batch, max_length, KV heads of this rank, head_dim].

    lengths: [batch] int64 on the device, tokens of each sequence so far; a sequence's next token is written there. Prompts of
        unequal lengths are padded on the right; then set `lengths` to their true lengths, so that what follows overwrites the
        padding, which nothing has attended to.
    static: attention reads all of `max_length` under a mask, so that every step has the same shapes and a CUDA graph can
        replay it (`lengths` grows on the device; whoever replays counts to `max_length`). Otherwise it reads what is filled.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        static: bool = False,
    ) -> None:
        shape = (layers, batch, max_length, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.max_length, self.static = max_length, static
        self._filled = 0  # no sequence is longer, which the host knows without asking the device

    @property
    def empty(self) -> bool:
        return self._filled == 0

    def positions(self, length: int) -> Tensor:
        """[batch, length] int64: of the next `length` tokens. ValueError where they would not fit."""
        if self._filled + length > self.max_length:
            raise ValueError(
                f"the KV cache holds {self.max_length} tokens a sequence; {self._filled} are filled and {length} more came"
            )
        return self.lengths.unsqueeze(1) + torch.arange(length, device=self.lengths.device)

    def visible(self, positions: Tensor) -> Tensor:
        """[batch, 1, length, keys] bool: what the tokens at `positions` [batch, length] may attend to."""
        keys = torch.arange(self._extent(positions.shape[1]), device=positions.device)
        return (keys <= positions.unsqueeze(-1)).unsqueeze(1)

    def write(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [batch, length, heads, head_dim]; returns all that `visible` speaks of."""
        batch = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1)
        self.keys[layer].index_put_((batch, positions), keys.to(self.keys.dtype))
        self.values[layer].index_put_((batch, positions), values.to(self.values.dtype))
        extent = self._extent(positions.shape[1])
        return self.keys[layer, :, :extent], self.values[layer, :, :extent]

    def advance(self, length: int) -> None:
        """`length` more tokens were written in every layer."""
        self.lengths += length
        self._filled += length

    def set_lengths(self, lengths: Tensor) -> None:
        """True lengths [batch] after a padded prompt, none beyond what was written."""
        if lengths.shape != self.lengths.shape or bool((lengths < 0).any()) or int(lengths.max()) > self._filled:
            raise ValueError(f"lengths must be [{len(self.lengths)}], each between 0 and the {self._filled} written")
        self.lengths.copy_(lengths)
        self._filled = int(lengths.max())

    def _extent(self, more: int) -> int:
        return self.max_length if self.static else self._filled + more
