"""Embedding, then All-to-All by the collective library, then a reorder: what users have today, and what fusing is to beat.

Lookups and updates are FBGEMM's kernels over the same tables and states. Where FBGEMM is missing or cannot, torch's do the
work; `fused_ops.counters()` has ("embedding_all_to_all_kernels", "fbgemm" | "torch", reason). On a GPU torch's wait for the
device and cannot be captured in a CUDA graph; FBGEMM's do neither, and a bad index is raised by the next call or
`fused_ops.check_errors()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops import exposed
from fused_ops.backends.baseline import embedding_fbgemm, embedding_fbgemm_cuda, embedding_torch
from fused_ops.backends.baseline.embedding_pack import packed_by_owner
from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.backends.baseline.index_checks import index_checks
from fused_ops.counters import count
from fused_ops.embedding_columns import received_sizes, reorder, sent_sizes
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.group import GroupContext, resolve


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`; `channel` means nothing here."""
    inputs.check()
    optimizer.check(inputs)
    layout = inputs.layout
    kernels, lookups = _kernels(inputs)
    if kernels is embedding_fbgemm_cuda:
        pooled = kernels.pool(lookups, index_checks(group, inputs.indices.device))
    else:
        pooled = kernels.pool(lookups)
    received = _exchange(pooled.view(-1), sent_sizes(layout, group.rank), received_sizes(layout, group.rank), group)
    return reorder(received, layout, group.rank)


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`. FBGEMM sorts inside its update, so the order is left empty."""
    inputs.check()
    inputs.check_gradient(grad)
    layout = inputs.layout
    packed = packed_by_owner(grad, layout, group.rank)
    received = _exchange(packed, received_sizes(layout, group.rank), sent_sizes(layout, group.rank), group)
    if average:
        received.div_(group.world)
    return received.view(layout.global_batch, inputs.local_dim), inputs.indices.new_empty(
        inputs.indices.shape, dtype=torch.int64
    )


def embedding_update(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    optimizer: OptimizerInputs,
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.embedding_backward._update`."""
    inputs.check()
    optimizer.check(inputs)
    kernels, lookups = _kernels(inputs, optimizer.kind, seen=True)
    weights_grad = _weights_grad(kernels, lookups, grad, weight_gradient)
    kernels.update(lookups, grad, optimizer)
    return weights_grad


def embedding_gradients(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    wanted: Sequence[int],
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> list[Tensor]:
    """See `fused_ops.embedding_backward._gradients`."""
    inputs.check()
    kernels, lookups = _kernels(inputs, seen=True)
    return [*kernels.dense_gradients(lookups, grad, wanted), _weights_grad(kernels, lookups, grad, weight_gradient)]


def _weights_grad(kernels: ModuleType, lookups: Any, grad: Tensor, wanted: bool) -> Tensor:
    return (
        kernels.weights_gradient(lookups, grad) if wanted else torch.empty(0, dtype=torch.float32, device=grad.device)
    )


def _kernels(inputs: EmbeddingInputs, optimizer: str = "none", seen: bool = False) -> tuple[ModuleType, Any]:
    """(the module that runs this call, the inputs as its functions take them). `seen`: forward has checked the values."""
    problem = None
    if inputs.indices.is_cuda:
        problem = embedding_fbgemm_cuda.why_not(inputs, optimizer)
        if problem is None:
            count(f"{OPERATOR}_kernels", "fbgemm", "baseline")
            return embedding_fbgemm_cuda, inputs
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{OPERATOR}: baseline cannot be captured in a CUDA graph here: {problem}")
    lookups = Lookups(inputs, seen)
    problem = problem or embedding_fbgemm.why_not(lookups, optimizer)
    count(f"{OPERATOR}_kernels", "torch" if problem else "fbgemm", problem or "baseline")
    return (embedding_torch if problem else embedding_fbgemm), lookups


def _exchange(input: Tensor, send: list[int], receive: list[int], group: GroupContext) -> Tensor:
    output = input.new_empty(sum(receive))
    with exposed.whole(input.device):
        dist.all_to_all_single(output, input, receive, send, group=resolve(group.name))
    return output
