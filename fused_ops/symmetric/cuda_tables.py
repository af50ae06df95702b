"""Small tables of numbers that kernels read, in device memory for as long as what they say stays the same."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from fused_ops.symmetric.cuda_graphs import current_capture
from fused_ops.symmetric.cuda_memory import check_cuda, library

MOST_TABLES = 256


class DeviceTables:
    """Written by a kernel that has the content among its arguments: no synchronisation, and right in a CUDA graph, which
    keeps the tables that it was captured with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def address(self, key: Hashable, make: Callable[[], ctypes.Array]) -> int:
        """The address of the table of that key; `make` gives its content the first time."""
        capture = current_capture(self._device)
        table = self._kept.get(key)
        if table is None:
            table = self._upload(make())
            if capture is None:  # in a capture nothing is written yet: only that graph may read it
                self._kept[key] = table
                if len(self._kept) > MOST_TABLES:
                    self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
            if capture is None:  # an evicted table's memory is used again when every stream that read it has passed
                table.record_stream(torch.cuda.current_stream(self._device))
        if capture is not None:
            capture.keep(table)
        return table.data_ptr()

    def _upload(self, content: ctypes.Array) -> torch.Tensor:
        size = ctypes.sizeof(content)
        table = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        lib, stream = library(self._device.index), torch.cuda.current_stream(self._device).cuda_stream
        code = lib.fo_cuda_write(
            ctypes.c_void_p(table.data_ptr()), content, ctypes.c_int64(size), ctypes.c_void_p(stream)
        )
        check_cuda(lib, code, f"writing a table of {size} bytes")
        return table
