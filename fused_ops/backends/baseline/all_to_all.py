"""All-to-All by the collective library: `torch.distributed.all_to_all_single` over NCCL or gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fused_ops import exposed
from fused_ops.all_to_all import check_splits
from fused_ops.symmetric.group import GroupContext, resolve


def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.all_to_all`; `channel` means nothing here."""
    send, receive = check_splits(input, output_splits, input_splits, group.world)
    output = input.new_empty((sum(receive), *input.shape[1:]))
    even = output_splits is None and input_splits is None
    with exposed.whole(input.device):
        dist.all_to_all_single(
            output,
            input.contiguous(),
            None if even else receive,
            None if even else send,
            group=resolve(group.name),
        )
    return output
