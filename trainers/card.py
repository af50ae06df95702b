"""Which GPU a rank takes, and how much of it."""

from __future__ import annotations

import torch

import fused_ops


def take_card(local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
    """Make this rank's card current; where ranks share it, cap this rank's persistent kernels at its part of the SMs.

    Ranks fill the cards in order: with 2 on each, ranks 0 and 1 are on the first. Grids sized to a part of the SMs lie side by
    side, which MPS's own percentages do not achieve (docs/one-gpu-lab.md). Raises ValueError where there are too few cards.
    """
    cards = torch.cuda.device_count()
    index = local_rank // ranks_per_gpu
    if index >= cards:
        raise ValueError(
            f"rank {local_rank} needs card {index} (ranks_per_gpu={ranks_per_gpu}), and torch sees {cards}; "
            "ranks_per_gpu=N lets N ranks share each card"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if ranks_per_gpu > 1:
        fused_ops.set_num_sms(max(1, torch.cuda.get_device_properties(device).multi_processor_count // ranks_per_gpu))
    return device
