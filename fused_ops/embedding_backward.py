"""The operators that backward of `embedding_all_to_all` calls: one exchange, and one of two that stay on this rank.

Per rank (B samples of all ranks, b of them here; D = the local features' summed width):

    embedding_all_to_all_gradient   output gradient [b, total_dim] -> All-to-All -> [B, D] on the table owners
    embedding_update                optimizer in backward: changes tables and states in place
    embedding_gradients             plain: dense gradients of the tables

The exchange has peers and is an ordered effect; the other two change what their schema says and nothing else. They take
the group and channel of the exchange because on a GPU its failure is known to the device alone: nothing is updated then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.dispatch import choose
from fused_ops.effects import TAGS, register_ordered
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.embedding_policy import describe
from fused_ops.symmetric.group import context, resolve


@torch.library.custom_op("fused_ops::embedding_all_to_all_gradient", mutates_args=(), tags=TAGS)
def _gradient(
    grad: Tensor,
    tables: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int] | None,
    layout: Sequence[int],
    dtype: torch.dtype,
    pooling: str,
    out_of_range: str,
    average_over_ranks: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> tuple[Tensor, Tensor]:
    """The output gradient [b, total_dim] -> ([B, D] on the table owners, the lookups in order of their row [nnz] int64)."""
    ctx = context(group)
    lookups = (tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, pooling, out_of_range)
    inputs = EmbeddingInputs(*lookups, ctx.rank, ctx.world)
    backend = choose(OPERATOR, comm, require_fused, indices.device, ctx, "gradient", describe(inputs, channel))
    return backend.embedding_all_to_all_gradient(grad, inputs, average_over_ranks, ctx, channel)


@_gradient.register_fake
def _(grad, tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, *rest):
    rank = resolve(rest[3]).rank()
    world = layout[0]
    counts = layout[2 + world : 2 + 2 * world]
    first = 2 + 2 * world + sum(counts[:rank])
    local_dim = sum(layout[first : first + counts[rank]])
    return grad.new_empty((sum(layout[2 : 2 + world]), local_dim)), indices.new_empty(indices.shape, dtype=torch.int64)


@torch.library.custom_op("fused_ops::embedding_update", mutates_args=("tables", "states"), tags=TAGS)
def _update(
    grad: Tensor,
    order: Tensor,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    learning_rate: Tensor,
    constants: Sequence[float],
    optimizer: str,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int] | None,
    layout: Sequence[int],
    dtype: torch.dtype,
    pooling: str,
    out_of_range: str,
    weight_gradient: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> Tensor:
    """Apply the optimizer. Returns the gradient of per_sample_weights [nnz] (from the tables before the update), or [0]."""
    ctx = context(group)
    lookups = (tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, pooling, out_of_range)
    inputs = EmbeddingInputs(*lookups, ctx.rank, ctx.world)
    backend = choose(OPERATOR, comm, require_fused, indices.device, ctx, "update", describe(inputs, channel))
    update = OptimizerInputs(optimizer, states, learning_rate, constants)
    return backend.embedding_update(grad, order, inputs, update, weight_gradient, ctx, channel)


@_update.register_fake
def _(grad, order, tables, states, learning_rate, constants, optimizer, indices, *rest):
    weight_gradient = rest[7]
    return indices.new_empty(indices.shape if weight_gradient else (0,), dtype=torch.float32)


@torch.library.custom_op("fused_ops::embedding_gradients", mutates_args=(), tags=TAGS)
def _gradients(
    grad: Tensor,
    order: Tensor,
    tables: Sequence[Tensor],
    wanted: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int] | None,
    layout: Sequence[int],
    dtype: torch.dtype,
    pooling: str,
    out_of_range: str,
    weight_gradient: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> list[Tensor]:
    """Dense gradients of the tables numbered in `wanted`, then the gradient of per_sample_weights ([nnz], or [0])."""
    ctx = context(group)
    lookups = (tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, pooling, out_of_range)
    inputs = EmbeddingInputs(*lookups, ctx.rank, ctx.world)
    backend = choose(OPERATOR, comm, require_fused, indices.device, ctx, "gradients", describe(inputs, channel))
    return backend.embedding_gradients(grad, order, inputs, wanted, weight_gradient, ctx, channel)


@_gradients.register_fake
def _(grad, order, tables, wanted, indices, *rest):
    weight_gradient = rest[7]
    last = indices.new_empty(indices.shape if weight_gradient else (0,), dtype=torch.float32)
    return [*(torch.empty_like(tables[t]) for t in wanted), last]


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(f"{OPERATOR}: its backward cannot be differentiated again (create_graph=True was used)")


for operator in (_gradient, _gradients):
    operator.register_autograd(_refuse_second_derivative)
register_ordered("fused_ops::embedding_all_to_all_gradient")
