"""Memory that kernels of every rank of a group address, by link.

peer:   device memory mapped into the peers by CUDA IPC (NVLink, PCIe peer access, or one card that several ranks share).
        torch.distributed._symmetric_memory would map it as well, but its rendezvous counts its calls a process, not a
        group (seen in torch 2.11): ranks that belong to different subgroups wait for each other for ever.
pinned: host memory shared by the processes and registered with each one's device, for GPUs that cannot reach each other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Mapping

import torch

from fused_ops.compiler import load_cuda_library
from fused_ops.errors import BackendUnavailableError
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.segment import SharedSegment

MAX_RANKS = 64
EXPORTED_BLOCK = 2 << 20
INT64_RESULTS = (
    "all_to_all_tile_bytes",
    "all_to_all_params_bytes",
    "embedding_params_bytes",
    "feature_bytes",
    "rows_params_bytes",
    "update_params_bytes",
    "update_scratch",
    "state_bytes",
    "record_bytes",
    "call_params_bytes",
    "control_bytes",
    "halted_offset",
    "timeout_offset",
)


@functools.cache
def library(device_index: int) -> ctypes.CDLL:
    """The native library for that device's architecture."""
    major, minor = torch.cuda.get_device_capability(device_index)
    lib = load_cuda_library(f"sm_{major}{minor}{'a' if major == 9 else ''}")
    lib.fo_cuda_error.restype = ctypes.c_char_p
    for name in INT64_RESULTS:
        getattr(lib, f"fo_cuda_{name}").restype = ctypes.c_int64
    return lib


def check_structs(lib: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """RuntimeError where the two sides of the C interface do not mean the same by a struct; keys as in `fo_cuda_<key>_bytes`."""
    for name, struct in structs.items():
        native = getattr(lib, f"fo_cuda_{name}_bytes")()
        if native != ctypes.sizeof(struct):
            raise RuntimeError(f"{struct.__name__} is {ctypes.sizeof(struct)} bytes in Python, {native} in the library")


def check_cuda(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: {lib.fo_cuda_error(code).decode()}")


def _all_well(group: GroupContext, what: str, problem: str, **mine: str) -> list[dict]:
    """Every rank's `mine`; RuntimeError on all ranks where one has a problem, so that none waits for it."""
    peers = group.exchange(what, {**mine, "problem": problem})
    bad = next((f"rank {r}: {peer['problem']}" for r, peer in enumerate(peers) if peer["problem"]), None)
    if bad is not None:
        raise RuntimeError(f"symmetric memory of group '{group.name}': {bad}")
    return peers


class PeerArena:
    """`size` bytes of device memory on every rank, zeroed; `addresses[r]` is rank r's, as this rank's kernels see it."""

    def __init__(self, group: GroupContext, device: torch.device, size: int) -> None:
        # CUDA exports whole blocks of 2 MiB; each arena has its own.
        self.size = -(-size // EXPORTED_BLOCK) * EXPORTED_BLOCK
        self._lib = library(device.index)
        handle = ctypes.create_string_buffer(self._lib.fo_cuda_ipc_handle_bytes())
        self._own = ctypes.c_void_p()
        with torch.cuda.device(device):
            code = self._lib.fo_cuda_share(ctypes.c_int64(self.size), ctypes.byref(self._own), handle)
            peers = _all_well(
                group,
                "peer arena",
                self._problem(code, f"allocating {self.size} bytes on {device}"),
                handle=handle.raw.hex(),
            )
            self.addresses, problem = [], ""
            for r, peer in enumerate(peers):
                address = self._own
                if r != group.rank:
                    address = ctypes.c_void_p()
                    code = self._lib.fo_cuda_open(bytes.fromhex(peer["handle"]), ctypes.byref(address))
                    problem = problem or self._problem(code, f"mapping memory of rank {r}")
                self.addresses.append(int(address.value or 0))
        self._opened = [address for r, address in enumerate(self.addresses) if r != group.rank and address]
        _all_well(group, "peer arena mapped", problem)

    def _problem(self, code: int, what: str) -> str:
        return f"{what}: {self._lib.fo_cuda_error(code).decode()}" if code else ""

    def close_peers(self) -> None:
        """Unmap the peers' memory: they may not free it before. No kernel that uses it may be in flight."""
        for address in self._opened:
            self._lib.fo_cuda_close(ctypes.c_void_p(address))
        self._opened = []

    def allow_free(self) -> None:
        """Every peer has unmapped this memory: free it with this object. (Otherwise it lives as long as the process.)"""
        weakref.finalize(self, self._lib.fo_cuda_free, self._own).atexit = False


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
        self._own_rank = group.rank
        for segment in self._segments:
            weakref.finalize(segment, lib.fo_cuda_unpin, ctypes.c_void_p(segment.address)).atexit = False

    def close_peers(self) -> None:
        """Unpin and unmap the peers' memory. No kernel that uses it may be in flight."""
        self._segments = [self._segments[self._own_rank]]
        self._own_rank = 0

    def allow_free(self) -> None:
        """Shared host memory lives until its last mapping dies, whoever unmaps first."""


def why_unavailable(group: GroupContext, device: torch.device) -> str | None:
    """Why the CUDA backend cannot serve this group, in the same words on every rank; None when it can.

    Collective the first time a group asks, since one rank may lack what the others have (nvcc, an architecture).
    """
    if group.world > MAX_RANKS:
        return f"the cuda backend takes groups of up to {MAX_RANKS} ranks, group '{group.name}' has {group.world}"
    if group.unreachable is not None:
        return group.unreachable

    def ask(group: GroupContext, _: int) -> str:
        problem = ""
        try:
            library(device.index)
        except (BackendUnavailableError, OSError) as error:
            problem = str(error)
        said = [peer["problem"] for peer in group.exchange("cuda library", {"problem": problem})]
        return next((f"rank {r}: {text}" for r, text in enumerate(said) if text), "")

    return group.fact("cuda library", ask) or None


def choose_link(group: GroupContext, device: torch.device) -> tuple[str, int]:
    """(link, how many ranks of the group share this device). The link is the one that all ranks have: peer where every pair
    of devices has it, else pinned."""
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    mine = {"device": visible[device.index], "link": group.link}
    peers = group.exchange("link", mine)
    wishes = {p["link"] for p in peers}
    if len(wishes) > 1:
        raise ValueError(f"ranks of group '{group.name}' ask for different links: {sorted(wishes)}")
    devices = [p["device"] for p in peers]
    reachable = all(
        d == mine["device"] or (d in visible and torch.cuda.can_device_access_peer(device.index, visible.index(d)))
        for d in devices
    )
    reach_all = all(p["reachable"] for p in group.exchange("reachable", {"reachable": reachable}))
    if group.link == "peer" and not reach_all:
        raise BackendUnavailableError(
            f"link 'peer' was asked for, but not all devices of group '{group.name}' reach each other"
        )
    link = group.link if group.link != "auto" else "peer" if reach_all else "pinned"
    return link, devices.count(mine["device"])
