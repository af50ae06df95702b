"""Embedding + All-to-All in Triton: pooled rows go straight into the outputs of the ranks that own the samples.

A call is three kernels in stream order: the check of this rank's offsets and indices, the sends, and the end of the call.
In backward the lookups are sorted between the last two, while the peers' slices are on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fused_ops.backends.triton.backward import update_rows, weights_gradient
from fused_ops.backends.triton.check import check_kernel
from fused_ops.backends.triton.exchange_gradient import exchange_gradient_kernel
from fused_ops.backends.triton.launch import (
    Sends,
    block_of,
    finish,
    link_arguments,
    open_channel,
    persistent_grid,
)
from fused_ops.backends.triton.lookup import lookup_kernel
from fused_ops.backends.triton.lookups import Lookups, byte_alignment
from fused_ops.embedding_columns import merged_runs, sample_starts
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.embedding_layout import EmbeddingLayout
from fused_ops.symmetric.group import GroupContext
from fused_ops.symmetric.triton_layout import State

CHECK_BLOCK = 1024
MOST_CHECKERS = 64  # programs a feature


def embedding_all_to_all(
    inputs: EmbeddingInputs, optimizer: OptimizerInputs, group: GroupContext, channel: int
) -> Tensor:
    """See `fused_ops.embedding_all_to_all`."""
    lane = open_channel(group, channel, inputs.indices.device)
    with lane.call(OPERATOR):
        lookups = Lookups(inputs, lane)
        optimizer.check(inputs)
        layout = inputs.layout
        tag, _ = lane.agreement.agree((OPERATOR, *layout.facts))
        lane.reserve(_largest_slot(layout))
        lane.describe(lookups.describe_problem())
        _check_values(lookups)

        bags, block_d = block_of(lookups.widest)
        num_features = len(inputs.dims)
        sends = Sends.plan(lane, [num_features * max(1, triton.cdiv(b, bags)) for b in layout.batch_sizes])
        receipt = lane.receive(inputs.output_shape, inputs.dtype)
        lookup_kernel[persistent_grid(lane, sends.num_tiles)](
            **link_arguments(lane, sends, tag, receipt),
            features=lookups.features,
            samples=lane.constants(sample_starts(layout)),
            offsets=lookups.offsets,
            indices=lookups.indices,
            weights=lookups.weights,
            batch=lookups.batch,
            total_dim=layout.total_dim,
            DTYPE=lookups.dtype,
            WEIGHTED=lookups.is_weighted,
            MEAN=lookups.mean,
            POLICY=lookups.policy,
            ALIGN=lookups.alignment,
            TABLE_BYTES=byte_alignment(inputs.tables),
            BAGS=bags,
            BLOCK_D=block_d,
        )
        return finish(lane, sends, tag, receipt, lookups.offsets, lookups.indices, lookups.batch)


def _largest_slot(layout: EmbeddingLayout) -> int:
    """Bytes that hold any rank's output and, in backward, any rank's packed gradient."""
    widest = max(layout.local_dim(r) for r in range(layout.world))
    return max(max(layout.batch_sizes) * layout.total_dim, layout.global_batch * widest) * layout.dtype.itemsize


def _check_values(lookups: Lookups) -> None:
    lane, num_indices = lookups.lane, lookups.indices.numel()
    features = max(1, len(lookups.inputs.dims))
    checkers = min(MOST_CHECKERS, max(1, triton.cdiv(max(num_indices // features, lookups.batch), CHECK_BLOCK)))
    check_kernel[(features, checkers)](
        lane.state,
        lookups.features,
        lookups.offsets,
        lookups.indices,
        num_indices,
        lookups.batch,
        lookups.offsets.numel() - 1,
        ANY_INDEX=lookups.inputs.out_of_range != "error",
        BLOCK=CHECK_BLOCK,
    )


def embedding_all_to_all_gradient(
    grad: Tensor, inputs: EmbeddingInputs, average: bool, group: GroupContext, channel: int
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.embedding_backward._gradient`."""
    lane = open_channel(group, channel, inputs.indices.device)
    operator = f"{OPERATOR} backward"
    with lane.call(operator):
        lookups = Lookups(inputs, lane)
        inputs.check_gradient(grad)
        layout, rank = inputs.layout, group.rank
        tag, _ = lane.agreement.agree((operator, "averaged" if average else "summed", *layout.facts))
        lane.reserve(_largest_slot(layout))
        lane.describe(lookups.describe_problem())
        grad = grad.contiguous()

        begin, columns, widths = merged_runs(layout)
        rows, block_d = block_of(max(widths, default=1))
        blocks = max(1, triton.cdiv(inputs.local_batch, rows))
        sends = Sends.plan(lane, [(begin[r + 1] - begin[r]) * blocks for r in range(group.world)])
        receipt = lane.receive((layout.global_batch, inputs.local_dim), inputs.dtype)
        exchange_gradient_kernel[persistent_grid(lane, sends.num_tiles)](
            **link_arguments(lane, sends, tag, receipt),
            runs=lane.constants(_run_words(begin, columns, widths)),
            run_begin=lane.constants(begin),
            local_dims=lane.constants([layout.local_dim(r) for r in range(group.world)]),
            grad=grad,
            first_sample=sample_starts(layout)[rank],
            num_samples=inputs.local_batch,
            total_dim=layout.total_dim,
            divisor=float(group.world),
            DTYPE=lookups.dtype,
            DIVIDE=average,
            ALIGN=lookups.alignment,
            ROWS=rows,
            BLOCK_D=block_d,
        )
        order = lookups.sorted_order()
        return finish(lane, sends, tag, receipt, lookups.offsets, lookups.indices, lookups.batch), order


def _run_words(begin: list[int], columns: list[int], widths: list[int]) -> list[int]:
    """(first column, width, first column in the owner's packed rows) of every run; one empty run where there is none."""
    words = []
    for first, end in itertools.pairwise(begin):
        packed = 0
        for run in range(first, end):
            words += [columns[run], widths[run], packed]
            packed += widths[run]
    return words or [0, 0, 0]


def embedding_update(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    optimizer: OptimizerInputs,
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.embedding_backward._update`. Nothing changes after a failure that is not raised yet."""
    lane = open_channel(group, channel, inputs.indices.device)
    optimizer.check(inputs)
    with lane.on_device():
        lookups = Lookups(inputs, lane)
        if optimizer.step is not None:
            optimizer.step.add_((lane.state[State.SUPPRESSED] == 0).to(torch.int64))
        last = weights_gradient(grad, order, lookups, weight_gradient)
        update_rows(grad, order, lookups, optimizer, inputs.tables)
    return last


def embedding_gradients(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    wanted: Sequence[int],
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> list[Tensor]:
    """See `fused_ops.embedding_backward._gradients`. All are NaN after a failure that is not raised yet."""
    lane = open_channel(group, channel, inputs.indices.device)
    with lane.on_device():
        lookups = Lookups(inputs, lane)
        start = torch.where(lane.state[State.SUPPRESSED] == 0, 0.0, float("nan")).to(inputs.dtype)
        dense = {t: start.expand(inputs.tables[t].shape).contiguous() for t in wanted}
        last = weights_gradient(grad, order, lookups, weight_gradient)
        targets = [dense.get(t) for t in range(len(inputs.tables))]
        update_rows(grad, order, lookups, OptimizerInputs("none", [], None, []), targets)
    return [*dense.values(), last]
