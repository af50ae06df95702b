"""The lab of a job that torchrun has started: on each host its first rank sets the lab up, the others enter it."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

from launch.lab import nccl
from launch.lab.errors import LabError
from launch.lab.one_gpu import OneGpuLab

INSIDE = "FUSECOMM_INSIDE_LAB"
NCCL_CTAS_OF_A_CARD = 16  # of all ranks: what NCCL takes while fused kernels run

_labs: list[OneGpuLab] = []  # a private daemon lives as long as its owner does


def enter(ranks_per_gpu: int, *, needs_nccl: bool = True, timeout_s: float = 600.0) -> None:
    """Ready this process for a shared card; collective. Comes before anything of CUDA or of a process group.

    An NCCL library that is to come before torch's can only be loaded by a new process: then this one replaces itself by
    the program as it was started, and `enter` returns at once the second time. Raises LabError, on every rank of the host,
    for what is missing there. The daemon ends with the process that started it.
    """
    if INSIDE in os.environ:
        return
    said = _set_up(ranks_per_gpu, needs_nccl) if os.environ["LOCAL_RANK"] == "0" else None
    said = _share(said, timeout_s)
    if said["problem"]:
        raise LabError(said["problem"])
    os.environ.update(said["environment"], **{INSIDE: "1"})
    if "LD_PRELOAD" in said["environment"]:
        for lab in _labs:
            lab.outlive_exec()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _set_up(ranks_per_gpu: int, needs_nccl: bool) -> dict:
    try:
        lab = OneGpuLab(ranks_per_gpu, nccl_path=nccl.chosen(None), needs_nccl=needs_nccl)
    except LabError as error:
        return {"problem": str(error), "environment": {}}
    _labs.append(lab)
    ctas = {"NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", str(max(1, NCCL_CTAS_OF_A_CARD // ranks_per_gpu)))}
    return {"problem": "", "environment": {**lab.environment, **ctas}}


def _share(said: dict | None, timeout_s: float) -> dict:
    """What the host's first rank says, on all its ranks."""
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    host, attempt = os.environ.get("GROUP_RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"one_gpu_lab/{host}/{attempt}"
    if said is not None:
        store.set(key, json.dumps(said))
    return json.loads(store.get(key))
