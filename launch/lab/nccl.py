"""Which NCCL ranks on a shared card need, and whether it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launch.lab.errors import LabError

OLDEST = (2, 30)  # before it, NCCL stops at two ranks on one device: "Duplicate GPU detected"
SETTING = "FUSECOMM_NCCL"
WHERE_FROM = (
    "`pip install nvidia-nccl-cu13==2.32.3 --no-deps --target DIR`, then set "
    f"{SETTING}=DIR/nvidia/nccl/lib/libnccl.so.2"
)
# Ranks on one device are allowed; multicast, which they cannot have, is off.
ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}

_ASK = (
    "import ctypes, sys; v = ctypes.c_int(); ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)); print(v.value)"
)


def chosen(path: str | None) -> str | None:
    """The library named by the setting, else by the environment variable FUSECOMM_NCCL; None = torch's own."""
    return path or os.environ.get(SETTING) or None


def version_of(path: str) -> tuple[int, int, int]:
    """Of a library file, asked in a process of its own. LabError where there is none."""
    if not Path(path).is_file():
        raise LabError(f"nccl={path} is not a file; get one by {WHERE_FROM}")
    done = subprocess.run(
        [sys.executable, "-I", "-c", _ASK, path], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise LabError(f"nccl={path} cannot be used: {done.stderr.strip().splitlines()[-1]}")
    code = int(done.stdout)
    return code // 10000, code // 100 % 100, code % 100


def loaded_version() -> tuple[int, ...] | None:
    """Of the NCCL that torch uses in this process; None where torch was built without."""
    import torch

    try:
        return tuple(torch.cuda.nccl.version())
    except AttributeError:
        return None


def check(version: tuple[int, ...] | None, whose: str) -> None:
    """LabError unless ranks that share a card can use it."""
    if version is None or version < OLDEST:
        has = "has no NCCL" if version is None else f"has NCCL {'.'.join(map(str, version))}"
        raise LabError(
            f"{whose} {has}; ranks that share a card need {'.'.join(map(str, OLDEST))} or later: {WHERE_FROM}"
        )


def preload(path: str) -> str:
    """LD_PRELOAD with that library in front, once."""
    others = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p != path]
    return ":".join([path, *others])
