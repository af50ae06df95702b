"""FBGEMM's table-batched CPU kernels, the ones behind SplitTableBatchedEmbeddingBagsCodegen, over the caller's own tables.

Features whose tables lie in one storage (as TorchRec allocates them) are one kernel call; tables allocated one by one are
one call each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.embedding_inputs import OptimizerInputs

MOST_ROWS = 2**31 - 1  # of a table in FBGEMM's CPU updates
OUTPUT_DTYPES = {torch.float32: 0, torch.float16: 1}  # FBGEMM's SparseType


@functools.cache
def _missing() -> str | None:
    try:
        import fbgemm_gpu  # noqa: F401

        torch.ops.fbgemm.split_embedding_codegen_forward_cpu  # noqa: B018
    except (ImportError, OSError, AttributeError) as error:
        return f"FBGEMM cannot be used: {error}".split("\n")[0]
    return None


def why_not(lookups: Lookups, optimizer: str = "none") -> str | None:
    """Why these kernels cannot take the lookups; None when they can."""
    tables = lookups.feature_tables
    if optimizer == "adam":
        return "FBGEMM has no CPU kernel for Adam"
    if lookups.inputs.dtype not in OUTPUT_DTYPES:
        return f"FBGEMM's CPU kernels do not take {lookups.inputs.dtype}"
    if any(lookups.tables[t].shape[0] > MOST_ROWS for t in tables):
        return f"FBGEMM's CPU updates take tables of up to {MOST_ROWS} rows"
    if any(a > b for a, b in itertools.pairwise(tables)):
        return "FBGEMM wants the features of a table side by side"
    return _missing()


@dataclass
class Run:
    """Features [first, last), whose tables share one storage, as FBGEMM's arguments."""

    first: int
    last: int
    weights: Tensor
    weights_offsets: Tensor
    dim_offsets: Tensor
    columns: slice
    widest: int
    hash_size_cumsum: Tensor
    total_hash_size_bits: int
    indices: Tensor
    offsets: Tensor
    indice_weights: Tensor | None
    pooling_mode: int

    @property
    def total_dim(self) -> int:
        return self.columns.stop - self.columns.start

    def tables(self) -> tuple:
        return self.weights, self.weights_offsets, self.dim_offsets


def _runs(lookups: Lookups, states: Sequence[Tensor] = ()) -> Iterator[Run]:
    """Runs of features whose tables share one storage; where states are given, they lie equally far from their tables."""

    def storage(f: int) -> tuple[int, ...]:
        table = lookups.tables[lookups.feature_tables[f]]
        if not states:
            return (table.untyped_storage().data_ptr(),)
        state = states[lookups.feature_tables[f]]
        starts = table.untyped_storage().data_ptr(), state.untyped_storage().data_ptr()
        # Only row-wise kernels ask where a state starts; Adagrad's takes the table's element for its state's.
        return (*starts, 0 if state.dim() == 1 else int(state.storage_offset()) - int(table.storage_offset()))

    factors = lookups.weights
    if factors is not None and lookups.mean:
        factors = factors / lookups.lengths_of_lookups()
    column = 0
    for _, group in itertools.groupby(range(len(lookups.feature_tables)), key=storage):
        features = list(group)
        first, last = features[0], features[-1] + 1
        tables = [lookups.tables[lookups.feature_tables[f]] for f in features]
        placed = tuple(t.storage_offset() for t in tables)
        dims, rows = tuple(t.shape[1] for t in tables), tuple(t.shape[0] for t in tables)
        distinct = tuple(lookups.feature_tables[f] for f in features)
        weights_offsets, dim_offsets, hash_size_cumsum, bits = _metadata(placed, dims, rows, distinct)
        lookup_range = slice(lookups.bounds[first], lookups.bounds[last])
        offsets = lookups.offsets[first * lookups.batch : last * lookups.batch + 1]
        # With weights, FBGEMM's mean pooling is wrong on CPU (1.8): the length goes into the weights.
        yield Run(
            first,
            last,
            flat(tables[0]),
            weights_offsets,
            dim_offsets,
            slice(column, column + sum(dims)),
            max(dims),
            hash_size_cumsum,
            bits,
            lookups.indices[lookup_range],
            offsets if first == 0 else offsets - lookups.bounds[first],
            None if factors is None else factors[lookup_range].contiguous(),
            int(lookups.mean and factors is None),
        )
        column += sum(dims)


@functools.lru_cache(maxsize=1024)
def _metadata(
    placed: tuple[int, ...], dims: tuple[int, ...], rows: tuple[int, ...], tables: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(weights_offsets, dim_offsets, hash_size_cumsum, total_hash_size_bits); features of one table share its entries."""
    cumsum, total, of_table = [], 0, {}
    for t, r in zip(tables, rows, strict=True):
        if t not in of_table:
            of_table[t] = total
            total += r
        cumsum.append(of_table[t])
    return (
        torch.tensor(placed, dtype=torch.int64),
        torch.tensor([0, *itertools.accumulate(dims)], dtype=torch.int32),
        torch.tensor([*cumsum, total], dtype=torch.int64),
        max(total, 1).bit_length(),
    )


def flat(tensor: Tensor) -> Tensor:
    """Its whole storage, 1-D."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def pool(lookups: Lookups) -> Tensor:
    """[B, D], features side by side."""
    parts = [
        torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            *run.tables(),
            run.total_dim,
            run.hash_size_cumsum,
            run.indices,
            run.offsets,
            run.pooling_mode,
            run.indice_weights,
            OUTPUT_DTYPES[run.weights.dtype],
        )
        for run in _runs(lookups)
        if lookups.batch
    ]
    if not parts:
        return lookups.indices.new_empty((lookups.batch, lookups.inputs.local_dim), dtype=lookups.inputs.dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def weights_gradient(lookups: Lookups, grad: Tensor) -> Tensor:
    """[nnz] float32."""
    parts = [
        torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            _columns(grad, run),
            *run.tables(),
            run.indices,
            run.offsets,
            torch.ones(run.last - run.first, dtype=torch.int32),
        )
        for run in _runs(lookups)
        if lookups.batch
    ]
    gradient = torch.cat(parts) if parts else torch.empty(0)
    return gradient / lookups.lengths_of_lookups() if lookups.mean else gradient


def dense_gradients(lookups: Lookups, grad: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """One gradient of the table's shape and dtype for each wanted table: SGD's step with rate -1 from zero."""
    minus_one = torch.tensor([-1.0])
    dense: dict[int, Tensor] = {}
    for run in _runs(lookups):
        target = torch.zeros_like(run.weights)
        if lookups.batch:
            torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(
                *_backward_arguments(run, target, grad), minus_one, output_dtype=OUTPUT_DTYPES[target.dtype]
            )
        for t in set(lookups.feature_tables[run.first : run.last]):
            table = lookups.tables[t]
            dense[t] = target[table.storage_offset() :][: table.numel()].view(table.shape)
    return [dense[t] if t in dense else torch.zeros_like(lookups.tables[t]) for t in wanted]


def _columns(grad: Tensor, run: Run) -> Tensor:
    return grad[:, run.columns].contiguous()


def _backward_arguments(run: Run, weights: Tensor, grad: Tensor) -> tuple:
    return (
        _columns(grad, run),
        weights,
        torch.zeros(run.last - run.first, dtype=torch.int32),
        run.weights_offsets,
        run.dim_offsets,
        run.widest,
        run.hash_size_cumsum,
        run.total_hash_size_bits,
        run.indices,
        run.offsets,
        run.pooling_mode,
        run.indice_weights,
        False,  # stochastic rounding
    )


def update(lookups: Lookups, grad: Tensor, optimizer: OptimizerInputs) -> None:
    """Apply the optimizer to the distinct rows, in place."""
    if lookups.batch == 0:
        return
    for run in _runs(lookups, optimizer.states):
        momentum1: Sequence[Tensor] = ()
        if optimizer.kind != "sgd":
            states = [optimizer.states[t] for t in lookups.feature_tables[run.first : run.last]]
            run, state = _level(run, states[0], lookups) if optimizer.kind == "adagrad" else (run, flat(states[0]))
            starts = torch.tensor([s.storage_offset() for s in states], dtype=torch.int64)
            momentum1 = (state, torch.zeros(len(states), dtype=torch.int32), starts)
        backward = {
            "sgd": torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu,
            "adagrad": torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu,
            "rowwise_adagrad": torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu,
        }[optimizer.kind]
        eps = () if optimizer.kind == "sgd" else (optimizer.eps,)
        arguments = _backward_arguments(run, run.weights, grad)
        output_dtype = OUTPUT_DTYPES[run.weights.dtype]
        backward(*arguments, *momentum1, optimizer.learning_rate, *eps, output_dtype=output_dtype)


def _level(run: Run, state: Tensor, lookups: Lookups) -> tuple[Run, Tensor]:
    """The run, and its flat state, with every table's first element where its state's is: FBGEMM's CPU Adagrad (1.6, 1.8)
    takes the one's offset for the other's."""
    table = lookups.tables[lookups.feature_tables[run.first]]
    ahead = int(table.storage_offset()) - int(state.storage_offset())
    if ahead <= 0:
        return run, flat(state)[-ahead:]
    return replace(run, weights=run.weights[ahead:], weights_offsets=run.weights_offsets - ahead), flat(state)
