"""Memory of a channel that holds packets and nothing else (native/cuda_packets.cuh): what is in it carries its own epoch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fused_ops.symmetric.cuda_channel import CudaChannel
from fused_ops.symmetric.cuda_graphs import current_capture
from fused_ops.symmetric.cuda_memory import PeerArena, PinnedArena
from fused_ops.symmetric.device_arenas import DeviceArenas
from fused_ops.symmetric.device_slots import SMALLEST_SLOT, slots_of

_areas: weakref.WeakKeyDictionary[CudaChannel, DeviceArenas] = weakref.WeakKeyDictionary()


def packet_memory(lane: CudaChannel, nbytes: int) -> Sequence[int]:
    """Where every rank's packets are, as this rank's kernels see it: at least `nbytes` on each, zeroed when made.

    Collective when it grows; all ranks pass the same number. A CUDA graph that is being captured keeps it.
    """
    areas = _areas.get(lane)
    if areas is None:
        kind = PeerArena if lane.link == "peer" else PinnedArena
        areas = _areas[lane] = DeviceArenas(lane.group, lane.device, kind, f"cuda packets {lane.index}")
    part = SMALLEST_SLOT
    while part * (slots_of(part) if lane.link == "peer" else 1) < nbytes:  # an arena is used as one piece
        part *= 2
    if not areas.hold(part):
        areas.grow(lane.agreement.operator, part, lambda: _finish(lane))
    capture = current_capture(lane.device)
    if capture is not None:
        areas.newest.capture(capture)
    memory = areas.newest.memory
    assert isinstance(memory, PeerArena | PinnedArena)
    return memory.addresses


def _finish(lane: CudaChannel) -> None:
    """This rank's kernels in flight on the channel have ended."""
    lane.stream_pointer()  # the current stream follows them
    torch.cuda.current_stream(lane.device).synchronize()
