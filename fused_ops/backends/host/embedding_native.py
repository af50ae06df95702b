"""The C++ side of the embedding kernels as Python sees it: structs, and checked calls that move nothing between ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.embedding_columns import merged_runs
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.agreement import int64_array, library
from fused_ops.symmetric.group import GroupContext

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
POLICY_CODES = {"error": 0, "clamp": 1, "hash": 2}
OPTIMIZER_CODES = {"none": 0, "sgd": 1, "adagrad": 2, "rowwise_adagrad": 3, "adam": 4}
FIRST_OFFSET, DECREASING, LAST_OFFSET, OUT_OF_RANGE, NO_ROWS = range(1, 6)

_ADDRESSES = ctypes.c_void_p
_NUMBERS = ctypes.c_void_p


class _Lookups(ctypes.Structure):
    """The C++ struct `Lookups`."""

    _fields_ = [
        ("features", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("nnz", ctypes.c_int64),
        ("tables", ctypes.c_int64),
        ("feature_table", _NUMBERS),
        ("table_rows", _NUMBERS),
        ("table_dim", _NUMBERS),
        ("table", _ADDRESSES),
        ("indices", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("index_bytes", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("mean", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class _Problem(ctypes.Structure):
    """The C++ struct `Problem`."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("feature", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("value", ctypes.c_int64),
    ]


class _Update(ctypes.Structure):
    """The C++ struct `Update`."""

    _fields_ = [
        ("lookups", _Lookups),
        ("order", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("target", _ADDRESSES),
        ("state", _ADDRESSES),
        ("second_state", _ADDRESSES),
        ("weight_grad", ctypes.c_void_p),
        ("learning_rate", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("step", ctypes.c_int64),
        ("optimizer", ctypes.c_int32),
    ]


class Lookups:
    """Checked inputs in the kernels' form. Holds what the struct points to."""

    def __init__(self, inputs: EmbeddingInputs, check_values: bool = True) -> None:
        inputs.check()
        self.inputs = inputs
        if inputs.indices.device.type != "cpu":
            raise ValueError(f"{OPERATOR}: the host backend takes CPU tensors, got {inputs.indices.device}")
        indices, weights = inputs.indices.contiguous(), inputs.weights
        offsets = inputs.offsets.to(torch.int64).contiguous()
        weights = None if weights is None else weights.contiguous()
        tables = inputs.tables
        numbers = (
            int64_array(inputs.feature_tables),
            int64_array([t.shape[0] for t in tables]),
            int64_array([t.shape[1] for t in tables]),
            addresses(tables),
        )
        self.struct = _Lookups(
            features=len(inputs.dims),
            batch=inputs.layout.global_batch,
            nnz=indices.numel(),
            tables=len(tables),
            feature_table=_at(numbers[0]),
            table_rows=_at(numbers[1]),
            table_dim=_at(numbers[2]),
            table=_at(numbers[3]),
            indices=indices.data_ptr(),
            offsets=offsets.data_ptr(),
            weights=None if weights is None else weights.data_ptr(),
            index_bytes=indices.element_size(),
            dtype=DTYPE_CODES[inputs.dtype],
            mean=int(inputs.pooling == "mean"),
            threads=torch.get_num_threads(),
        )
        self._alive = [numbers, indices, offsets, weights]
        row_bits = max((t.shape[0] for t in tables), default=1).bit_length()
        if row_bits + library().fo_embedding_payload_bits(ctypes.byref(self.struct)) > 64:
            raise ValueError(
                f"{OPERATOR}: {indices.numel()} lookups in tables of 2^{row_bits} rows are more than the kernels can sort"
            )
        if check_values:
            self._check_values()

    def _check_values(self) -> None:
        """ValueError for bad offsets and indices; under clamp and hash, indices are replaced by valid ones."""
        policy = POLICY_CODES[self.inputs.out_of_range]
        problem = _Problem()
        library().fo_embedding_check(self.pointer, policy, ctypes.byref(problem))
        kind, at, value, feature = problem.kind, problem.at, problem.value, problem.feature
        if kind == FIRST_OFFSET:
            raise ValueError(f"{OPERATOR}: offsets must start with 0, got {value}")
        if kind == LAST_OFFSET:
            raise ValueError(f"{OPERATOR}: offsets must end with the number of indices, {self.struct.nnz}, got {value}")
        if kind == DECREASING:
            raise ValueError(
                f"{OPERATOR}: offsets must not decrease: offsets[{at}] = {value} is below offsets[{at - 1}] (feature {feature})"
            )
        if kind in (OUT_OF_RANGE, NO_ROWS):
            raise ValueError(self.inputs.describe_index(feature, at, value))
        if kind == -OUT_OF_RANGE:
            valid = torch.empty(self.struct.nnz, dtype=torch.int64)
            library().fo_embedding_make_valid(self.pointer, policy, ctypes.c_void_p(valid.data_ptr()))
            self._alive.append(valid)
            self.struct.indices = valid.data_ptr()
            self.struct.index_bytes = 8

    @property
    def pointer(self):  # type: ignore[no-untyped-def]
        return ctypes.byref(self.struct)


class GradientRuns:
    """The columns of an output gradient that each rank's features need, as the packing kernels take them."""

    def __init__(self, inputs: EmbeddingInputs) -> None:
        begin, columns, widths = merged_runs(inputs.layout)
        local_dims = [inputs.layout.local_dim(r) for r in range(inputs.world)]
        self.arguments = (int64_array(begin), int64_array(columns), int64_array(widths), int64_array(local_dims))


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


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
    optimizer.check(inputs)
    assert optimizer.learning_rate is not None
    if optimizer.step is not None:
        optimizer.step.add_(1)
    return _run(grad, order, inputs, optimizer, list(inputs.tables), weight_gradient)


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
    dense = {t: torch.zeros_like(inputs.tables[t]) for t in wanted}
    targets = [dense.get(t) for t in range(len(inputs.tables))]
    last = _run(grad, order, inputs, OptimizerInputs("none", [], None, []), targets, weight_gradient)
    return [*dense.values(), last]


def _run(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    optimizer: OptimizerInputs,
    targets: Sequence[Tensor | None],
    weight_gradient: bool,
) -> Tensor:
    lookups = Lookups(inputs, check_values=False)
    weights_grad = torch.empty(inputs.indices.numel() if weight_gradient else 0, dtype=torch.float32)
    grad = grad.contiguous()
    target_array, count = addresses(targets), len(targets)
    first, second = (addresses(optimizer.table_states(which, count) or [None] * count) for which in (0, 1))
    update = _Update(
        lookups=lookups.struct,
        order=order.data_ptr(),
        grad=grad.data_ptr(),
        target=_at(target_array),
        state=_at(first),
        second_state=_at(second),
        weight_grad=weights_grad.data_ptr() if weight_gradient else None,
        learning_rate=0.0 if optimizer.learning_rate is None else optimizer.learning_rate.item(),
        eps=optimizer.eps,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        step=0 if optimizer.step is None else int(optimizer.step),
        optimizer=OPTIMIZER_CODES[optimizer.kind],
    )
    library().fo_embedding_update(ctypes.byref(update))
    return weights_grad


def _at(array: ctypes.Array) -> int:
    return ctypes.addressof(array)
