"""Shared memory of one host that every rank of a group maps: the arena of kernels that run on the CPU."""

from __future__ import annotations

import os

import torch

from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment import SharedSegment


class SegmentArena:
    """`size` bytes on every rank, zeroed; `addresses[r]` is rank r's, as this process sees it."""

    def __init__(self, group: GroupContext, device: torch.device, size: int) -> None:
        assert device.type == "cpu"
        self.size = size
        self.own = SharedSegment.create(size)
        peers = group.exchange("segment arena", {"pid": os.getpid(), "fd": self.own.fd})
        self._segments = [
            self.own if r == group.rank else SharedSegment.open(peer["pid"], peer["fd"], size)
            for r, peer in enumerate(peers)
        ]
        self.addresses = [segment.address for segment in self._segments]
        group.exchange("segment arena mapped", {})
        self.own.close_fd()

    def close_peers(self) -> None:
        """Unmap the peers' memory. No kernel that uses it may be in flight."""
        self._segments = [self.own]

    def allow_free(self) -> None:
        """Shared memory lives until its last mapping dies, whoever unmaps first."""
