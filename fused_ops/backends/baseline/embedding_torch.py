"""Lookups, gradients and updates with torch alone: for dtypes FBGEMM's CPU kernels lack, and where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.embedding_inputs import OptimizerInputs


def pool(lookups: Lookups) -> Tensor:
    """[B, D], features side by side."""
    parts = [_pool_feature(lookups, f) for f in range(len(lookups.feature_tables))]
    if not parts:
        return lookups.indices.new_empty((lookups.batch, 0), dtype=lookups.inputs.dtype)
    return torch.cat(parts, dim=1)


def _pool_feature(lookups: Lookups, f: int) -> Tensor:
    table = lookups.tables[lookups.feature_tables[f]]
    indices = lookups.of_feature(lookups.indices, f)
    if table.dtype == torch.float32 and lookups.weights is None:
        mode = "mean" if lookups.mean else "sum"
        offsets = lookups.feature_offsets(f)
        return torch.nn.functional.embedding_bag(indices, table.detach(), offsets, mode=mode, include_last_offset=True)
    factors = _factors(lookups, f)
    rows = table.detach().index_select(0, indices).float() * factors[:, None]
    pooled = torch.zeros(lookups.batch, table.shape[1], device=table.device)
    return pooled.index_add_(0, _bags(lookups, f), rows).to(table.dtype)


def _bags(lookups: Lookups, f: int) -> Tensor:
    """[lookups of the feature]: the sample each belongs to."""
    return torch.repeat_interleave(lookups.feature_offsets(f).diff())


def _factors(lookups: Lookups, f: int) -> Tensor:
    """[lookups of the feature] float32: weight, over the bag's length where pooling is mean."""
    lengths = lookups.feature_offsets(f).diff()
    scale = lengths.clamp(min=1).float().reciprocal() if lookups.mean else torch.ones_like(lengths, dtype=torch.float32)
    scale = torch.repeat_interleave(scale, lengths)
    return scale if lookups.weights is None else scale * lookups.of_feature(lookups.weights, f)


def _feature_grads(lookups: Lookups, grad: Tensor) -> list[Tensor]:
    """Each feature's columns of [B, D], repeated for its lookups: [lookups of the feature, dim] float32."""
    if not lookups.feature_tables:
        return []
    columns = grad.split([lookups.tables[t].shape[1] for t in lookups.feature_tables], dim=1)
    return [columns[f].float().index_select(0, _bags(lookups, f)) for f in range(len(columns))]


def _row_grads(lookups: Lookups, grad: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(table, distinct rows [n], their summed gradients [n, dim] float32) of every table that is looked up."""
    per_feature = _feature_grads(lookups, grad)
    for t in sorted(set(lookups.feature_tables)):
        features = [f for f, table in enumerate(lookups.feature_tables) if table == t]
        indices = torch.cat([lookups.of_feature(lookups.indices, f) for f in features])
        contributions = torch.cat([per_feature[f] * _factors(lookups, f)[:, None] for f in features])
        rows, inverse = indices.unique(return_inverse=True)
        summed = contributions.new_zeros(len(rows), contributions.shape[1])
        yield t, rows, summed.index_add_(0, inverse, contributions)


def weights_gradient(lookups: Lookups, grad: Tensor) -> Tensor:
    """[nnz] float32."""
    parts = []
    for f, feature_grad in enumerate(_feature_grads(lookups, grad)):
        rows = lookups.tables[lookups.feature_tables[f]].detach()
        rows = rows.index_select(0, lookups.of_feature(lookups.indices, f)).float()
        lengths = lookups.feature_offsets(f).diff()
        scale = (
            lengths.clamp(min=1).float().reciprocal() if lookups.mean else torch.ones_like(lengths, dtype=torch.float32)
        )
        parts.append((feature_grad * rows).sum(1) * torch.repeat_interleave(scale, lengths))
    return torch.cat(parts) if parts else torch.empty(0, device=grad.device)


def dense_gradients(lookups: Lookups, grad: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """One gradient of the table's shape and dtype for each wanted table."""
    dense = {t: torch.zeros_like(lookups.tables[t]) for t in wanted}
    for t, rows, summed in _row_grads(lookups, grad):
        if t in dense:
            dense[t].index_copy_(0, rows, summed.to(dense[t].dtype))
    return list(dense.values())


def update(lookups: Lookups, grad: Tensor, optimizer: OptimizerInputs) -> None:
    """Apply the optimizer to the distinct rows; see FusedOptimizer."""
    assert optimizer.learning_rate is not None
    count = len(lookups.tables)
    first, second = (optimizer.table_states(which, count) for which in (0, 1))
    if optimizer.step is not None:
        optimizer.step.add_(1)
    for t, rows, summed in _row_grads(lookups, grad):
        if optimizer.kind == "adagrad":
            state = first[t].index_add_(0, rows, summed * summed).index_select(0, rows)
            step = summed / (state.sqrt() + optimizer.eps)
        elif optimizer.kind == "rowwise_adagrad":
            state = first[t].index_add_(0, rows, (summed * summed).mean(1)).index_select(0, rows)
            step = summed / (state.sqrt() + optimizer.eps)[:, None]
        elif optimizer.kind == "adam":
            step = _adam_step(optimizer, first[t], second[t], rows, summed)
        else:
            step = summed
        table = lookups.tables[t].detach()
        changed = table.index_select(0, rows).float() - optimizer.learning_rate * step
        table.index_copy_(0, rows, changed.to(table.dtype))


def _adam_step(optimizer: OptimizerInputs, mean: Tensor, squares: Tensor, rows: Tensor, summed: Tensor) -> Tensor:
    """Updates the rows' states; [distinct rows, dim] to be multiplied by the learning rate."""
    (beta1, beta2), step = optimizer.betas, optimizer.step
    m = beta1 * mean.index_select(0, rows) + (1 - beta1) * summed
    v = beta2 * squares.index_select(0, rows) + (1 - beta2) * summed * summed
    mean.index_copy_(0, rows, m)
    squares.index_copy_(0, rows, v)
    assert step is not None
    return (m / (1 - beta1 ** step.float())) / ((v / (1 - beta2 ** step.float())).sqrt() + optimizer.eps)
