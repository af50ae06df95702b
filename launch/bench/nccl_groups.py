"""NCCL communicators of several sizes, for a baseline at NCCL's best setting.

How many CTAs an exchange should take depends on its size and on what shares the card; NCCL's own choice can be far off
where ranks share one. Each communicator here has exactly so many; the exchange alone is timed on each.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

DEFAULT_CTAS = (4, 8, 16, 32)


def fitting(wanted: list[int], num_sms: int, ranks_per_gpu: int) -> list[int]:
    """Those CTA counts whose kernels of all ranks of a card fit on it at once; NCCL hangs where they do not."""
    most = num_sms // ranks_per_gpu
    return [ctas for ctas in wanted or DEFAULT_CTAS if ctas <= most]


def make(ctas: int, timeout_s: float) -> dist.ProcessGroup:
    """All ranks, over a communicator of that many CTAs. Collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    group = dist.new_group(backend="nccl", pg_options=options, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group
