"""Register an operator as an ordered effect, so that a compiler neither merges, drops nor reorders its calls."""

from __future__ import annotations

import torch

# Of every operator: inductor's own CUDA graphs (mode="reduce-overhead") leave it out, since they demand that every output
# lies in their pool of memory, and ours lie in symmetric memory. `torch.cuda.graph` is not concerned.
TAGS = (torch.Tag.cudagraph_unsafe,)


def register_ordered(operator: str) -> None:
    """`operator`: a qualified name such as "fused_ops::all_to_all". torch has no public spelling of this yet."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)
