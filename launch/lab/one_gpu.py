"""The lab: everything that N ranks on one GPU need, made ready, and undone at the end."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from launch.lab import mps, nccl
from launch.lab.errors import LabError

# Ranks that start their kernels together, as any collective makes them, would land on the same SMs and take turns there.
FORBIDDEN = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class OneGpuLab:
    """Sets os.environ so that processes started from here on can share a card, `ranks_per_gpu` on each.

    With ranks_per_gpu=1 it does nothing. A daemon that the user has named by CUDA_MPS_PIPE_DIRECTORY is used and left
    running; else a private one is started, and ended by `close` or with this process. use_mps=False does without.
    nccl_path: a libnccl.so.2 put in front of torch's own (None: FUSECOMM_NCCL, else torch's). needs_nccl=False accepts
    an NCCL that is too old for ranks that share a card, for work that does not use it.

    Raises LabError, one line, for what is missing.
    """

    def __init__(
        self, ranks_per_gpu: int, *, nccl_path: str | None = None, use_mps: bool = True, needs_nccl: bool = True
    ) -> None:
        self.ranks_per_gpu = ranks_per_gpu
        self.mps = "none"  # none | private | user's | off
        self._private: mps.PrivateMps | None = None
        self._before: dict[str, str | None] = {}
        if ranks_per_gpu == 1:
            return
        if FORBIDDEN in os.environ:
            raise LabError(
                f"unset {FORBIDDEN}: under it ranks land on the same SMs; the lab shares the card by grid size"
            )
        environment = self._nccl_environment(nccl.chosen(nccl_path), needs_nccl)
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        environment |= self._mps_environment(use_mps)
        self._set(environment)

    def _nccl_environment(self, path: str | None, needed: bool) -> dict[str, str]:
        version = nccl.version_of(path) if path else nccl.loaded_version()
        if needed:
            nccl.check(version, f"nccl={path}" if path else "torch")
        return {**nccl.ENVIRONMENT, **({"LD_PRELOAD": nccl.preload(path)} if path else {})}

    def _mps_environment(self, use_mps: bool) -> dict[str, str]:
        theirs = os.environ.get(mps.PIPES)
        if not use_mps:
            if theirs is not None:
                raise LabError(f"mps=off, but {mps.PIPES}={theirs} is set, which every rank would follow: unset it")
            self.mps = "off"
            return {}
        if theirs is not None:
            if mps.servers(Path(theirs)) is None:
                raise LabError(
                    f"{mps.PIPES}={theirs} is set, but no MPS daemon answers there: start it, or unset the variable"
                )
            self.mps = "user's"
            return {}
        self._private = mps.PrivateMps()
        self.mps = "private"
        return self._private.environment

    def check_in_use(self) -> None:
        """LabError unless a process has reached the daemon: else ranks take turns, and nobody would know."""
        if self.mps in ("private", "user's") and not mps.servers(Path(os.environ[mps.PIPES])):
            raise LabError(
                "the ranks run, but none of them has connected to the MPS daemon: its log is in "
                f"{os.environ.get(mps.LOGS, os.environ[mps.PIPES])}"
            )

    @property
    def environment(self) -> dict[str, str]:
        """What has been set in os.environ."""
        return {name: os.environ[name] for name in self._before}

    def outlive_exec(self) -> None:
        """Keep the daemon until the program that is about to replace this process ends."""
        if self._private is not None:
            self._private.outlive_exec()

    def close(self) -> None:
        """End what was started, and put os.environ back."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}
        if self._private is not None:
            self._private.close()

    def _set(self, environment: dict[str, str]) -> None:
        for name, value in environment.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value

    def __enter__(self) -> OneGpuLab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
