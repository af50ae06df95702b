"""How a model's layers are split over ranks, and by which collectives they work together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """Given to every parallel layer at construction.

    group: the ranks that share one copy of the model. None: this rank alone, so nothing is split and nothing is fused.
    comm, channel, require_fused: as the operators of `fused_ops` take them; comm may name each operator's.
    sequence_parallel: between the parallel layers each rank holds rows of the activations instead of a copy of them all
        (Korthikanti et al., arXiv 2205.05198). Rows are tokens, split as even as whole rows allow.
    save_gathered: sequence parallel only. Keep the gathered input of a column-parallel linear for its weight gradient; False
        gathers it again in backward: memory against time.
    """

    group: dist.ProcessGroup | None = None
    comm: str | Mapping[str, str] = "fused"
    channel: int = 0
    require_fused: bool = False
    sequence_parallel: bool = False
    save_gathered: bool = True

    def __post_init__(self) -> None:
        if self.group is not None and dist.get_rank(self.group) < 0:
            raise ValueError("this rank is not a member of the tensor-parallel group")

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a copied model works with the same ranks

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def options(self, operator: str) -> dict[str, Any]:
        """The keyword arguments of that operator of `fused_ops`."""
        return {
            "group": self.group,
            "channel": self.channel,
            "comm": self.comm if isinstance(self.comm, str) else self.comm[operator],
            "require_fused": self.require_fused,
        }
