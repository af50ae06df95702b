"""The embedding kernels' C structs, and the checked inputs in their form."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.embedding_columns import merged_runs
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs
from fused_ops.symmetric.cuda_channel import CallParams, CudaChannel
from fused_ops.symmetric.cuda_memory import MAX_RANKS, check_structs

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
POLICY_CODES = {"error": 0, "clamp": 1, "hash": 2}
OPTIMIZER_CODES = {"none": 0, "sgd": 1, "adagrad": 2, "rowwise_adagrad": 3, "adam": 4}
VECTOR = 16  # bytes that a lane moves at once where everything is aligned to it
MOST_ROWS = 2**32 - 1
FEWEST_LANES = 8  # that share a row: kGroup of native/cuda_lookup.cuh
LOOKUPS_A_TILE = 64
MOST_BAGS_A_TILE = 16

Begins = ctypes.c_int64 * (MAX_RANKS + 1)
Firsts = ctypes.c_int32 * (MAX_RANKS + 1)
PerRank = ctypes.c_int64 * MAX_RANKS
SmallPerRank = ctypes.c_int32 * MAX_RANKS


class Feature(ctypes.Structure):
    """`Feature` of native/cuda_lookup.cuh."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("packed", ctypes.c_int64),
        ("dim", ctypes.c_int32),
        ("table_number", ctypes.c_int32),
        ("vector", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
    ]


class LookupParams(ctypes.Structure):
    """`Lookups` of native/cuda_lookup.cuh."""

    _fields_ = [
        ("features", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("nnz", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("num_features", ctypes.c_int32),
        ("mean", ctypes.c_int32),
        ("policy", ctypes.c_int32),
        ("bags", ctypes.c_int32),
    ]


class EmbeddingParams(ctypes.Structure):
    """`EmbeddingParams` of embedding_all_to_all.cu."""

    _fields_ = [
        ("call", CallParams),
        ("lookups", LookupParams),
        ("run_column", ctypes.c_void_p),
        ("run_width", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("sample_begin", Begins),
        ("run_begin", Firsts),
        ("copy_rows", ctypes.c_int32),
    ]


class RowsParams(ctypes.Structure):
    """`RowsParams` of embedding_rows.cu."""

    _fields_ = [
        ("call", CallParams),
        ("input", ctypes.c_void_p),
        ("send_runs", ctypes.c_void_p),
        ("receive_runs", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("divisor", ctypes.c_float),
        ("send_run", SmallPerRank),
        ("send_run_end", SmallPerRank),
        ("receive_run", SmallPerRank),
        ("receive_run_end", SmallPerRank),
        ("input_row", PerRank),
        ("send_rows", PerRank),
        ("remote_row", PerRank),
        ("remote_stride", PerRank),
        ("receive_row", PerRank),
        ("receive_rows", PerRank),
        ("send_tile_rows", SmallPerRank),
        ("receive_tile_rows", SmallPerRank),
    ]


class OptimizerParams(ctypes.Structure):
    """`OptimizerParams` of native/cuda_optimizer.cuh."""

    _fields_ = [
        ("learning_rate", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
    ]


class UpdateParams(ctypes.Structure):
    """`UpdateParams` of embedding_update.cu."""

    _fields_ = [
        ("lookups", LookupParams),
        ("optimizer", OptimizerParams),
        ("order", ctypes.c_void_p),
        ("bag_of", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_stride", ctypes.c_int64),
        ("halted", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("shift", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("index_bytes", ctypes.c_int32),
    ]


STRUCTS = {
    "feature": Feature,
    "embedding_params": EmbeddingParams,
    "rows_params": RowsParams,
    "update_params": UpdateParams,
}


class Lookups:
    """Checked inputs in the kernels' form. Holds what the struct points to."""

    def __init__(self, inputs: EmbeddingInputs, lane: CudaChannel) -> None:
        inputs.check()
        check_structs(lane.lib, STRUCTS)
        tallest = max((t.shape[0] for t in inputs.tables), default=0)
        if tallest > MOST_ROWS:
            raise ValueError(f"{OPERATOR}: the kernels take tables of up to {MOST_ROWS} rows, got one of {tallest}")
        self.inputs, self.lane = inputs, lane
        self.indices, self.offsets = _of_one_type(inputs.indices.contiguous(), inputs.offsets.contiguous())
        self.weights = None if inputs.weights is None else inputs.weights.detach().contiguous()
        self.index_bytes = self.indices.element_size()
        self.dtype = DTYPE_CODES[inputs.dtype]
        self.struct = LookupParams(
            features=self._features(),
            indices=self.indices.data_ptr(),
            offsets=self.offsets.data_ptr(),
            weights=None if self.weights is None else self.weights.data_ptr(),
            nnz=self.indices.numel(),
            batch=inputs.layout.global_batch,
            num_features=len(inputs.dims),
            mean=int(inputs.pooling == "mean"),
            policy=POLICY_CODES[inputs.out_of_range],
            bags=self._bags_a_tile(),
        )
        rows = tuple(inputs.tables[t].shape[0] for t in inputs.feature_tables)
        lane.note(functools.partial(_describe, tuple(inputs.feature_tables), rows, inputs.layout.global_batch))

    def _features(self) -> int:
        inputs = self.inputs
        tables = tuple(t.data_ptr() for t in inputs.tables)
        rows = tuple(t.shape[0] for t in inputs.tables)
        key = (
            "features",
            tables,
            rows,
            inputs.dims,
            inputs.columns,
            inputs.layout.total_dim,
            inputs.dtype,
            *inputs.feature_tables,
        )
        return self.lane.tables.address(key, lambda: _feature_table(inputs, tables, rows))

    def _bags_a_tile(self) -> int:
        """A tile is the least that a warp claims: enough lookups to be worth a claim, few enough for warps to end together."""
        bags = max(1, len(self.inputs.dims) * self.inputs.layout.global_batch)
        widest = max(self.inputs.dims, default=1) * self.inputs.dtype.itemsize
        side_by_side = max(1, 32 * VECTOR // power_of_two(widest))  # bags that a warp pools at once
        pooling = max(1, self.indices.numel() // bags)
        return side_by_side * max(1, min(MOST_BAGS_A_TILE, LOOKUPS_A_TILE // pooling))

    @property
    def payload_bits(self) -> int:
        """Bits below the row in a sorted word: of a position where lookups have weights, else of a bag."""
        most = self.struct.nnz if self.weights is not None else self.struct.num_features * self.struct.batch
        return max(1, most.bit_length())

    @property
    def row_bits(self) -> int:
        bits = max(1, (sum(t.shape[0] for t in self.inputs.tables) - 1).bit_length())
        if bits + self.payload_bits > 64:
            raise ValueError(
                f"{OPERATOR}: {self.struct.nnz} lookups in tables of 2^{bits} rows are more than the kernels can sort"
            )
        return bits

    @property
    def pointer(self):  # type: ignore[no-untyped-def]
        return ctypes.byref(self.struct)


def _describe(
    feature_tables: Sequence[int], rows: Sequence[int], batch: int, index: bool, feature: int, at: int, value: int
) -> str:
    if index:
        return (
            f"index {value} (position {at}, feature {feature}) is out of range for table {feature_tables[feature]}, "
            f"which has {rows[feature]} rows"
        )
    if at == 0:
        return f"offsets must start with 0, got {value}"
    if at == len(feature_tables) * batch:
        return f"offsets must end with the number of indices, got {value}"
    return f"offsets must not decrease nor leave the indices: offsets[{at}] = {value} (feature {feature})"


def _of_one_type(indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    if indices.dtype == offsets.dtype:
        return indices, offsets
    return indices.to(torch.int64), offsets.to(torch.int64)


def power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _feature_table(inputs: EmbeddingInputs, tables: Sequence[int], rows: Sequence[int]) -> ctypes.Array:
    size = inputs.dtype.itemsize
    first_rows = [sum(rows[:t]) for t in range(len(rows))]
    features = (Feature * len(inputs.dims))()
    packed = 0
    for f, (t, dim, column) in enumerate(zip(inputs.feature_tables, inputs.dims, inputs.columns, strict=True)):
        places = (tables[t], dim * size, column * size, packed, inputs.layout.total_dim * size, inputs.local_dim * size)
        vector = VECTOR if all(place % VECTOR == 0 for place in places) else size
        lanes = min(32, max(FEWEST_LANES, power_of_two(dim * size // vector)))
        features[f] = Feature(tables[t], rows[t], first_rows[t], column * size, packed, dim, t, vector, lanes)
        packed += dim * size
    return features


def runs_in_columns(inputs: EmbeddingInputs) -> tuple[list[int], list[int], list[int], list[int]]:
    """(each rank's first run [W + 1], column in the output, column in the packed rows, width) in bytes."""
    size = inputs.dtype.itemsize
    begin, columns, widths = merged_runs(inputs.layout)
    packed = [0] * len(columns)
    for r in range(inputs.world):
        at = 0
        for run in range(begin[r], begin[r + 1]):
            packed[run] = at
            at += widths[run] * size
    return begin, [c * size for c in columns], packed, [w * size for w in widths]
