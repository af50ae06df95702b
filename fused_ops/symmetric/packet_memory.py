"""Memory of a channel that holds packets and nothing else (native/cuda_packets.cuh): what is in it carries its own epoch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fused_ops.symmetric.cuda_channel import CudaChannel
from fused_ops.symmetric.cuda_graphs import current_capture
from fused_ops.symmetric.cuda_memory import PeerArena, PinnedArena
from fused_ops.symmetric.device_arenas import DeviceArenas
from fused_ops.symmetric.device_slots import SMALLEST_SLOT, slots_of

_areas: weakref.WeakKeyDictionary[CudaChannel, DeviceArenas] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Packets:
    """Where every rank's packets are, as this rank's kernels see it. Calls of even and odd epochs have a half each."""

    addresses: Sequence[int]
    half_bytes: int


def packet_memory(lane: CudaChannel, nbytes: int) -> Packets:
    """Memory with at least `nbytes` for each half on every rank, zeroed when made. The halves are the memory's own, not the
    call's: a peer may be in the call before, whose packets a half cut by this call's layout could reach into.

    Collective when it grows; all ranks pass the same number. A CUDA graph that is being captured keeps it.
    """
    areas = _areas.get(lane)
    if areas is None:
        kind = PeerArena if lane.link == "peer" else PinnedArena
        areas = _areas[lane] = DeviceArenas(lane.group, lane.device, kind, f"cuda packets {lane.index}")
    part = SMALLEST_SLOT
    while part * (slots_of(part) if lane.link == "peer" else 1) < 2 * nbytes:  # an arena is used as one piece
        part *= 2
    if not areas.hold(part):
        areas.grow(lane.agreement.operator, part, lambda: _finish(lane))
    capture = current_capture(lane.device)
    if capture is not None:
        areas.newest.capture(capture)
    memory = areas.newest.memory
    assert isinstance(memory, PeerArena | PinnedArena)
    return Packets(memory.addresses, memory.size // 2)


def _finish(lane: CudaChannel) -> None:
    """This rank's kernels in flight on the channel have ended."""
    lane.stream_pointer()  # the current stream follows them
    torch.cuda.current_stream(lane.device).synchronize()
