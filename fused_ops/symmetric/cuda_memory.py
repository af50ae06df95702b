"""Memory that kernels of every rank of a group address, by link.

peer:   device memory mapped into the peers by `torch.distributed._symmetric_memory` (NVLink, PCIe peer access, or one card
        that several ranks share).
pinned: host memory shared by the processes and registered with each one's device, for GPUs that cannot reach each other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref

import torch

from fused_ops.compiler import load_cuda_library
from fused_ops.errors import BackendUnavailableError
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment import SharedSegment

LINKS = ("peer", "pinned")


@functools.cache
def library(device_index: int) -> ctypes.CDLL:
    """The native library for that device's architecture."""
    major, minor = torch.cuda.get_device_capability(device_index)
    lib = load_cuda_library(f"sm_{major}{minor}{'a' if major == 9 else ''}")
    lib.fo_cuda_error.restype = ctypes.c_char_p
    for name in ("tile_bytes", "params_bytes"):
        getattr(lib, f"fo_cuda_all_to_all_{name}").restype = ctypes.c_int64
    lib.fo_cuda_state_bytes.restype = lib.fo_cuda_control_bytes.restype = ctypes.c_int64
    return lib


def check_cuda(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: {lib.fo_cuda_error(code).decode()}")


class PeerArena:
    """`size` bytes of device memory on every rank, zeroed; `addresses[r]` is rank r's, as this rank's kernels see it."""

    def __init__(self, group: GroupContext, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.size = size
        self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.current_stream(device).synchronize()
        self._handle = symmetric_memory.rendezvous(self._memory, group.name)  # type: ignore[arg-type]
        self.addresses = [int(a) for a in self._handle.buffer_ptrs]
        group.exchange("arena ready", {})


class PinnedArena:
    """`size` bytes of shared host memory for every rank, zeroed, registered with this rank's device."""

    def __init__(self, group: GroupContext, device: torch.device, size: int) -> None:
        self.size = size
        lib = library(device.index)
        mine = SharedSegment.create(size)
        peers = group.exchange("pinned arena", {"pid": os.getpid(), "fd": mine.fd})
        self._segments = [
            mine if r == group.rank else SharedSegment.open(p["pid"], p["fd"], size) for r, p in enumerate(peers)
        ]
        self.addresses = []
        for segment in self._segments:
            address = ctypes.c_void_p()
            with torch.cuda.device(device):
                code = lib.fo_cuda_pin(ctypes.c_void_p(segment.address), ctypes.c_int64(size), ctypes.byref(address))
            check_cuda(lib, code, f"pinning {size} bytes of shared host memory")
            self.addresses.append(int(address.value or 0))
        group.exchange("pinned arena mapped", {})
        mine.close_fd()
        for segment in self._segments:
            weakref.finalize(segment, lib.fo_cuda_unpin, ctypes.c_void_p(segment.address)).atexit = False


def choose_link(group: GroupContext, device: torch.device) -> str:
    """The link that all ranks of the group share: peer where every pair of devices has it, else pinned."""
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    mine = {"device": visible[device.index], "link": group.link}
    peers = group.exchange("link", mine)
    wishes = {p["link"] for p in peers}
    if len(wishes) > 1:
        raise ValueError(f"ranks of group '{group.name}' ask for different links: {sorted(wishes)}")
    devices = [p["device"] for p in peers]
    if len(set(devices)) < len(devices):
        # Several ranks share a card: torch refuses that unless told that it is meant.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    reachable = all(
        d == mine["device"]
        or (d in mine["visible"] and torch.cuda.can_device_access_peer(device.index, mine["visible"].index(d)))
        for d in devices
    )
    reach_all = all(p["reachable"] for p in group.exchange("reachable", {"reachable": reachable}))
    if group.link == "peer" and not reach_all:
        raise BackendUnavailableError(
            f"link 'peer' was asked for, but not all devices of group '{group.name}' reach each other"
        )
    if group.link == "auto":
        return "peer" if reach_all else "pinned"
    return group.link


def link_label(group: GroupContext, link: str, devices: set[str]) -> str:
    """How results name the link."""
    if link == "pinned":
        return "PCIe host"
    return "same-GPU" if len(devices) == 1 else "peer GPUs"
