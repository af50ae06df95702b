"""Pooled embedding lookups fused with the All-to-All that takes them to the ranks that own the samples.

Per rank (W ranks; F local features over T local tables; B = sum(batch_sizes) samples in all, b of them here; D = the local
features' summed width; total_dim columns over all ranks):

    forward     lookups [B, D] of the global batch, stored by the kernel into the outputs [b, total_dim] of all ranks
    backward    output gradient [b, total_dim] -> All-to-All -> [B, D] on the table owners -> tables and states
                (the operators of `embedding_backward`)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops.embedding_backward  # noqa: F401  (registers the operators that backward calls)
from fused_ops import host_values
from fused_ops.dispatch import choose
from fused_ops.effects import TAGS, register_ordered
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.embedding_layout import EmbeddingLayout
from fused_ops.embedding_optimizer import FusedOptimizer
from fused_ops.embedding_policy import describe
from fused_ops.symmetric.group import context, group_name, resolve

# Keeps the graph connected on a rank without tables, and where the tables are no leaves: every rank runs backward.
_ANCHOR = torch.zeros(0, requires_grad=True)


def embedding_all_to_all(
    tables: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    layout: EmbeddingLayout,
    *,
    feature_tables: Sequence[int] | None = None,
    pooling: str = "sum",
    per_sample_weights: Tensor | None = None,
    optimizer: FusedOptimizer | None = None,
    average_over_ranks: bool = True,
    out_of_range: str = "error",
    group: dist.ProcessGroup | str | None = None,
    channel: int = 0,
    comm: str = "fused",
    require_fused: bool = False,
) -> Tensor:
    """Look up this rank's tables for the whole batch and return the pooled rows of this rank's samples, all features.

    tables: T shards [rows_t, dim_t] of layout.dtype, contiguous. In backward the optimizer changes them in place; without
        one, those that require grad get a dense gradient.
    indices: [nnz] int32 or int64. offsets: [F * B + 1] int32 or int64, feature-major: bag (f, b) is
        indices[offsets[f * B + b] : offsets[f * B + b + 1]]; may be empty, which gives zeros.
    layout: equal on all ranks; see EmbeddingLayout.
    feature_tables: the table that each local feature looks up; None = feature f looks up table f.
    pooling: "sum", or "mean" (over the bag's length).
    per_sample_weights: [nnz] float32 factors of the rows; differentiable.
    optimizer: applied in backward, at the learning rate that it had in forward (as in FBGEMM). Two calls in flight on one
        table update it one after the other, in the order of their backwards, each from the values it finds.
    average_over_ranks: divide the output gradient by W, as TorchRec and DDP do. Equal on all ranks.
    out_of_range: "error" names table and value; "clamp" to the nearest row; "hash" takes the index modulo the rows.
    channel: calls on one channel of a group are issued in the same order on every rank.
    comm: "fused", "baseline" (FBGEMM or torch, then `all_to_all_single`), "auto" (whose forward of the two is the faster,
        measured once for each dtype and power of two of samples, features and columns; backward follows), "unfused" (the
        fused backend's lookups, then its All-to-All, then a reorder), or a backend's name.
    returns [b, total_dim] of layout.dtype: the caller's, no later call changes it.

    Inputs are never changed. Sums run in fp32 in a fixed order, whatever the number of threads. Backward happens on every
    rank or on none.

    Raises ValueError before anything is sent for what this rank or the comparison with the others shows to be wrong (the
    others then raise PeerAbortedError); PeerTimeoutError, PeerLostError, PeerAbortedError; BackendUnavailableError under
    `require_fused`. Under "baseline" ranks do not hear of each other's ValueError: they wait in the collective library, for
    its timeout or until the rank that raised ends its process.
    """
    if optimizer is not None:
        tables = [table.detach() for table in tables]
    return torch.ops.fused_ops.embedding_all_to_all(
        _ANCHOR,
        list(tables),
        indices,
        offsets,
        per_sample_weights,
        None if feature_tables is None else list(feature_tables),
        layout.encoded,
        layout.dtype,
        pooling,
        out_of_range,
        "none" if optimizer is None else optimizer.kind,
        [] if optimizer is None else optimizer.states,
        None if optimizer is None else optimizer.learning_rate_tensor,
        [] if optimizer is None else optimizer.constants,
        average_over_ranks,
        group_name(group),
        channel,
        comm,
        require_fused,
    )


@torch.library.custom_op("fused_ops::embedding_all_to_all", mutates_args=(), tags=TAGS)
def _embedding_all_to_all(
    anchor: Tensor,
    tables: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int] | None,
    layout: Sequence[int],
    dtype: torch.dtype,
    pooling: str,
    out_of_range: str,
    optimizer: str,
    states: Sequence[Tensor],
    learning_rate: Tensor | None,
    constants: Sequence[float],
    average_over_ranks: bool,
    group: str,
    channel: int,
    comm: str,
    require_fused: bool,
) -> Tensor:
    ctx = context(group)
    lookups = (tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, pooling, out_of_range)
    update = OptimizerInputs(optimizer, states, learning_rate, constants)
    given = EmbeddingInputs(*lookups, ctx.rank, ctx.world)

    def run(backend: ModuleType) -> Tensor:
        return backend.embedding_all_to_all(given, update, ctx, channel)

    return run(choose(OPERATOR, comm, require_fused, indices.device, ctx, describe=describe(given, channel, run)))


@_embedding_all_to_all.register_fake
def _(anchor, tables, indices, offsets, per_sample_weights, feature_tables, layout, dtype, *rest):
    group = rest[7]
    rank = resolve(group).rank()
    return indices.new_empty((layout[2 + rank], layout[1]), dtype=dtype)


def _save(ctx, inputs, output):
    _, ctx.tables, indices, offsets, weights, *rest = inputs
    # Tables and states are not saved for backward: another call's backward may have updated them by then, rightly.
    ctx.save_for_backward(indices, offsets, weights)
    ctx.feature_tables, ctx.layout, ctx.dtype, ctx.pooling, ctx.out_of_range, *rest = rest
    (
        ctx.optimizer,
        ctx.states,
        learning_rate,
        ctx.constants,
        ctx.average,
        ctx.group,
        ctx.channel,
        ctx.comm,
        ctx.require_fused,
    ) = rest
    ctx.learning_rate = None if learning_rate is None else host_values.clone(learning_rate)


def _backward(ctx, output_grad):
    indices, offsets, weights = ctx.saved_tensors
    lookups = (indices, offsets, weights, ctx.feature_tables, ctx.layout, ctx.dtype, ctx.pooling, ctx.out_of_range)
    grad, order = torch.ops.fused_ops.embedding_all_to_all_gradient(
        output_grad, ctx.tables, *lookups, ctx.average, ctx.group, ctx.channel, ctx.comm, ctx.require_fused
    )
    weight_gradient = weights is not None and ctx.needs_input_grad[4]
    where = (ctx.group, ctx.channel, ctx.comm, ctx.require_fused)
    table_grads: list[Tensor | None] = [None] * len(ctx.tables)
    if ctx.optimizer == "none":
        wanted = [t for t, needed in enumerate(ctx.needs_input_grad[1]) if needed]
        *dense, weights_grad = torch.ops.fused_ops.embedding_gradients(
            grad, order, ctx.tables, wanted, *lookups, weight_gradient, *where
        )
        for t, table_grad in zip(wanted, dense, strict=True):
            table_grads[t] = table_grad
    else:
        weights_grad = torch.ops.fused_ops.embedding_update(
            grad,
            order,
            ctx.tables,
            ctx.states,
            ctx.learning_rate,
            ctx.constants,
            ctx.optimizer,
            *lookups,
            weight_gradient,
            *where,
        )
    # torch takes an empty list of numbers for a list of tensors, and wants a list back.
    feature_tables_grad: list | None = [] if ctx.feature_tables == [] else None
    constants_grad: list | None = None if ctx.constants else []
    states_grad = [None] * len(ctx.states)
    head = (None, table_grads, None, None, weights_grad if weight_gradient else None, feature_tables_grad)
    return *head, *(None,) * 5, states_grad, None, constants_grad, *(None,) * 5


_embedding_all_to_all.register_autograd(_backward, setup_context=_save)
register_ordered("fused_ops::embedding_all_to_all")
