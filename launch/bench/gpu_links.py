"""What lies between the ranks' GPUs: the label of a row, found by looking, never by what was asked for."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from fused_ops.symmetric.group import context, group_name

SAME_GPU, PCIE_HOST, PCIE_PEER, NVLINK = "same-GPU", "PCIe host", "PCIe peer", "NVLink"


def label(group: dist.ProcessGroup) -> str:
    """Of the link that the group's CUDA channels use; it has been used. Collective."""
    links = {channel.link for channel in context(group_name(group)).channels() if hasattr(channel, "link")}
    if len(links) != 1:
        raise RuntimeError(f"the group's channels use {sorted(links) or 'no link'}; expected one")
    if links == {"pinned"}:
        return PCIE_HOST
    cards: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(cards, torch.cuda.current_device())
    if len(set(cards)) == 1:
        return SAME_GPU
    return NVLINK if all(_by_nvlink(a, b) for a, b in itertools.combinations(sorted(set(cards)), 2)) else PCIE_PEER


def _by_nvlink(a: int, b: int) -> bool:
    connectivity = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink")  # type: ignore[attr-defined]
    return connectivity.matrix[a][b] > 0
