"""Captures of CUDA graphs: what a graph holds the addresses of is kept until nobody can replay it."""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch

from fused_ops.symmetric.cuda_memory import check_cuda, library

_captures: dict[int, Capture] = {}  # by number, those that are not over
_lock = threading.Lock()


class Capture:
    """The calls that one graph was captured from. CUDA tells when the graph and all executable copies of it are destroyed."""

    def __init__(self, lib: ctypes.CDLL, watch: int) -> None:
        self._lib, self._watch = lib, watch
        self._kept: list[object] = []
        weakref.finalize(self, lib.fo_cuda_end_watch, ctypes.c_void_p(watch)).atexit = False

    @property
    def over(self) -> bool:
        """Nobody can replay it any more."""
        return bool(self._lib.fo_cuda_capture_over(ctypes.c_void_p(self._watch)))

    def keep(self, thing: object) -> None:
        """Keep it alive until the capture is over (or a little longer)."""
        self._kept.append(thing)


def current_capture(device: torch.device) -> Capture | None:
    """The capture that the device's current stream is in."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    lib, stream = library(device.index), ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    number = ctypes.c_uint64()
    check_cuda(lib, lib.fo_cuda_capture_number(stream, ctypes.byref(number)), "asking for a stream's capture")
    with _lock:
        known = _captures.get(number.value)
        if known is None:
            for over in [n for n, capture in _captures.items() if capture.over]:
                del _captures[over]
            watch = ctypes.c_void_p()
            check_cuda(lib, lib.fo_cuda_watch_capture(stream, ctypes.byref(watch)), "watching a CUDA graph")
            assert watch.value is not None
            known = _captures[number.value] = Capture(lib, watch.value)
    return known
