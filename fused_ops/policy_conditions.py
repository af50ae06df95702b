"""What a backend's time depends on beside the call itself: machines, devices, link, libraries and their versions."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
import torch.distributed as dist

import fused_ops
from fused_ops.symmetric.group import GroupContext, resolve


def own_conditions(device: torch.device) -> dict:
    """What the other ranks have to be told."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"machine": properties.name, "device": str(properties.uuid)}
    return {"machine": f"{_cpu_model()}, {torch.get_num_threads()} threads a rank", "device": ""}


def conditions(ranks: list[dict], device: torch.device, group: GroupContext) -> str:
    """In words, the same on every rank: part of a decision's name on disk. `ranks`: everybody's own conditions.

    The fused backend has run on `group` before: its link is known.
    """
    devices = len({said["device"] for said in ranks})
    return "; ".join(
        [
            f"{group.world} ranks on {devices} x {' + '.join(sorted({said['machine'] for said in ranks}))}",
            f"{_link(device, group)} against {dist.get_backend(resolve(group.name))}",
            f"fused_ops {fused_ops.__version__}, torch {torch.__version__}",
        ]
    )


def _link(device: torch.device, group: GroupContext) -> str:
    if device.type == "cpu":
        return "shared memory"
    return " + ".join(sorted({lane.link for lane in group.channels() if getattr(lane, "device", None) == device}))


@functools.cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())
