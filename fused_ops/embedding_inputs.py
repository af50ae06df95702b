"""What one rank hands to `embedding_all_to_all`, and what can be wrong with it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.embedding_layout import EmbeddingLayout
from fused_ops.embedding_optimizer import KEEPS_STEP, TABLE_STATES, state_shape

OPERATOR = "embedding_all_to_all"
POOLINGS = ("sum", "mean")
POLICIES = ("error", "clamp", "hash")


@dataclass
class EmbeddingInputs:
    """The arguments as they came. `check` says what this rank alone can see to be wrong with their shapes and types."""

    tables: Sequence[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    given_feature_tables: Sequence[int] | None
    encoded_layout: Sequence[int]
    dtype: torch.dtype
    pooling: str
    out_of_range: str
    rank: int
    world: int

    @functools.cached_property
    def layout(self) -> EmbeddingLayout:
        return EmbeddingLayout.decode(self.encoded_layout, self.dtype)

    @property
    def dims(self) -> tuple[int, ...]:
        return self.layout.feature_dims[self.rank]  # type: ignore[return-value]

    @property
    def columns(self) -> tuple[int, ...]:
        return self.layout.feature_columns[self.rank]  # type: ignore[return-value]

    @functools.cached_property
    def feature_tables(self) -> list[int]:
        return list(range(len(self.dims)) if self.given_feature_tables is None else self.given_feature_tables)

    @property
    def local_batch(self) -> int:
        return self.layout.batch_sizes[self.rank]

    @property
    def local_dim(self) -> int:
        return sum(self.dims)

    @property
    def output_shape(self) -> tuple[int, int]:
        return self.local_batch, self.layout.total_dim

    def check(self) -> None:
        """ValueError naming the argument, what it is and what is allowed. Values are checked by the backend's kernels."""
        if self.layout.world != self.world:
            raise _wrong(f"layout is for {self.layout.world} ranks, the group has {self.world}")
        if self.pooling not in POOLINGS:
            raise _wrong(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if self.out_of_range not in POLICIES:
            raise _wrong(f"out_of_range must be one of {', '.join(POLICIES)}, got {self.out_of_range!r}")
        self._check_tables()
        for name, tensor in (("indices", self.indices), ("offsets", self.offsets)):
            if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
                raise _wrong(f"{name} must be 1-D int32 or int64, got {tensor.dim()}-D {tensor.dtype}")
            self._check_device(name, tensor)
        bags = len(self.dims) * self.layout.global_batch
        if self.offsets.numel() != bags + 1:
            raise _wrong(
                f"offsets needs {bags + 1} entries ({len(self.dims)} local features x {self.layout.global_batch} samples of "
                f"all ranks + 1), got {self.offsets.numel()}"
            )
        if self.weights is not None:
            if self.weights.dtype != torch.float32 or self.weights.shape != self.indices.shape:
                raise _wrong(
                    f"per_sample_weights must be float32 [{self.indices.numel()}], one a lookup, "
                    f"got {self.weights.dtype} {list(self.weights.shape)}"
                )
            self._check_device("per_sample_weights", self.weights)

    def _check_tables(self) -> None:
        for t, table in enumerate(self.tables):
            if table.dim() != 2 or table.dtype != self.dtype or not table.is_contiguous():
                raise _wrong(
                    f"table {t} must be a contiguous [rows, dim] tensor of the layout's {self.dtype}, got "
                    f"{'' if table.is_contiguous() else 'non-contiguous '}{table.dtype} {list(table.shape)}"
                )
            self._check_device(f"table {t}", table)
        if len(self.feature_tables) != len(self.dims):
            raise _wrong(
                f"feature_tables needs one entry a local feature ({len(self.dims)}), got {len(self.feature_tables)}"
            )
        for f, (t, dim) in enumerate(zip(self.feature_tables, self.dims, strict=True)):
            if not 0 <= t < len(self.tables):
                raise _wrong(f"feature {f} looks up table {t}, but this rank has {len(self.tables)} tables")
            if self.tables[t].shape[1] != dim:
                raise _wrong(f"feature {f} is {dim} wide in the layout, its table {t} is {self.tables[t].shape[1]}")

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.indices.device:
            raise _wrong(f"{name} is on {tensor.device}, indices on {self.indices.device}")

    def check_gradient(self, grad: Tensor) -> None:
        if tuple(grad.shape) != self.output_shape or grad.dtype != self.dtype:
            raise _wrong(
                f"the output's gradient must be {self.dtype} {list(self.output_shape)}, got {grad.dtype} {list(grad.shape)}"
            )

    def describe_index(self, feature: int, position: int, value: int) -> str:
        t = self.feature_tables[feature]
        return (
            f"{OPERATOR}: index {value} (position {position}, feature {feature}) is out of range for table {t}, "
            f"which has {self.tables[t].shape[0]} rows"
        )


@dataclass
class OptimizerInputs:
    """The optimizer's arguments as they came. kind "none" is the plain-gradient mode."""

    kind: str
    states: Sequence[Tensor]
    learning_rate: Tensor | None
    constants: Sequence[float]

    @property
    def eps(self) -> float:
        return self.constants[0] if self.constants else 0.0

    @property
    def betas(self) -> tuple[float, float]:
        return (self.constants[1], self.constants[2]) if len(self.constants) == 3 else (0.0, 0.0)

    def table_states(self, which: int, num_tables: int) -> list[Tensor]:
        """The first (0) or second (1) state of every table; empty for an optimizer that has none."""
        if which >= len(TABLE_STATES.get(self.kind, ())):
            return []
        return list(self.states[which * num_tables : (which + 1) * num_tables])

    @property
    def step(self) -> Tensor | None:
        """int64 [1]: backwards so far, of an optimizer that counts them."""
        return self.states[-1] if self.kind in KEEPS_STEP else None

    def check(self, inputs: EmbeddingInputs) -> None:
        """ValueError where the states do not fit the tables, or threads would update one row at once."""
        if self.kind == "none":
            return
        tables, device = inputs.tables, inputs.indices.device
        _check_disjoint("table", tables)
        _check_disjoint("state", self.states)
        shapes, keeps_step = TABLE_STATES[self.kind], self.kind in KEEPS_STEP
        expected = len(shapes) * len(tables) + keeps_step
        if len(self.states) != expected:
            kept = f"{len(shapes)} state(s) a table ({len(tables)} here){' and a step' if keeps_step else ''}"
            raise _wrong(f"optimizer {self.kind} keeps {kept}: expected {expected} tensors, got {len(self.states)}")
        for which, shape in enumerate(shapes):
            for t, (state, table) in enumerate(zip(self.table_states(which, len(tables)), tables, strict=True)):
                wanted = state_shape(shape, table)
                if state.shape != wanted or state.dtype != torch.float32 or not state.is_contiguous():
                    raise _wrong(
                        f"the {self.kind} state of table {t} must be contiguous float32 {list(wanted)} ({shape}), "
                        f"got {state.dtype} {list(state.shape)}"
                    )
                _check_same_device(f"the {self.kind} state of table {t}", state, table)
        if self.step is not None and (self.step.dtype != torch.int64 or self.step.shape != (1,)):
            raise _wrong(f"the {self.kind} step must be int64 [1], got {self.step.dtype} {list(self.step.shape)}")
        if self.step is not None and self.step.device != device:  # a rank without tables counts its steps as well
            raise _wrong(
                f"the {self.kind} step is on {self.step.device}, indices on {device}; `FusedOptimizer.make_states` takes the "
                "device of a rank without tables"
            )
        if self.learning_rate is not None and tables:
            _check_same_device("the learning rate (FusedOptimizer's device)", self.learning_rate, tables[0])


def _check_same_device(name: str, tensor: Tensor, table: Tensor) -> None:
    if tensor.device != table.device:
        raise _wrong(f"{name} is on {tensor.device}, the tables on {table.device}")


def _check_disjoint(name: str, tensors: Sequence[Tensor]) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, t in enumerate(tensors) if t.numel())
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end:
            first, second = sorted((i, j))
            raise _wrong(
                f"{name} {first} and {name} {second} share memory; several features look up one table by `feature_tables`"
            )


def _wrong(message: str) -> ValueError:
    return ValueError(f"{OPERATOR}: {message}")
