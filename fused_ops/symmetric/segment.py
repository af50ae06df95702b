"""Anonymous shared memory that other processes of this host can map.

A `memfd` has no name, so a killed process leaves nothing in /dev/shm, and its size is not bound by that mount. Peers open
it as /proc/<pid>/fd/<fd>, which the kernel allows to processes of the same user in the same pid namespace.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref


class SharedSegment:
    """`size` bytes, zeroed when created. `address` is where this process sees them."""

    def __init__(self, memory: mmap.mmap, fd: int | None) -> None:
        self.memory = memory
        self.fd = fd
        self._close = None if fd is None else weakref.finalize(self, os.close, fd)
        self.size = len(memory)
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        fd = os.memfd_create("fused_ops", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(mmap.mmap(fd, size), fd)

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> SharedSegment:
        """Map a peer's segment; OSError when the kernel does not let this process reach it."""
        handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(handle, size), None)
        finally:
            os.close(handle)

    def close_fd(self) -> None:
        """Peers that have not mapped the segment yet no longer can; memory lives until the last mapping dies."""
        if self._close is not None:
            self._close()
            self.fd = None

    def release(self) -> None:
        """Give the pages back, although peers may keep the segment mapped. Nobody may store into it any more."""
        self.close_fd()
        self.memory.madvise(mmap.MADV_REMOVE)


def host_identity() -> str:
    """Equal for two processes exactly when they can see each other's /proc entries: one boot, one pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
