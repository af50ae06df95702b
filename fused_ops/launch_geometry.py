"""How many SMs a persistent kernel takes: ranks that share a card divide it by grid size."""

from __future__ import annotations

_num_sms: int | None = None


def set_num_sms(num_sms: int | None) -> None:
    """Cap every persistent kernel of this process at that many blocks of one an SM; None = the operator's default."""
    global _num_sms
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms must be at least 1, got {num_sms}")
    _num_sms = num_sms


def num_blocks(tiles: int, sms: int) -> int:
    """Blocks, of one an SM, for a kernel that claims `tiles` blocks' worth of tiles and may fill up to `sms` SMs."""
    return max(1, min(tiles, sms, _num_sms or sms))
