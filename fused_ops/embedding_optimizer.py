"""The optimizer that the backward of `embedding_all_to_all` applies to the tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.host_values import remember

# Shapes of the states that a table of [rows, dim] has, all float32. Adam has one more for all tables: its step, int64 [1].
TABLE_STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("[rows, dim]",),
    "rowwise_adagrad": ("[rows]",),
    "adam": ("[rows, dim]", "[rows, dim]"),
}
KEEPS_STEP = ("adam",)


class FusedOptimizer:
    """Updates the tables inside backward, with FBGEMM's semantics: once per distinct row, in fp32, no weight decay.

    kind: "sgd":             w -= lr * g
          "adagrad":         s += g * g;        w -= lr * g / (sqrt(s) + eps)
          "rowwise_adagrad": s += mean(g * g);  w -= lr * g / (sqrt(s) + eps)
          "adam":            m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g * g;  k += 1 once a backward
                             w -= lr * (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)
        where g is the sum of the row's gradients over the global batch. Rows without a gradient do not change.
    states: float32, contiguous, changed in place: none (sgd); s [rows, dim] a table (adagrad); s [rows] a table
        (rowwise_adagrad); all m, then all v [rows, dim], then k int64 [1] (adam). `make_states` allocates zeros. They are on the
        tables' device; k of a rank without tables, which counts its steps as well, on the device of its indices.
    betas: (b1, b2) of adam.
    device: where the learning rate lives, by default with the states, else with the CPU. It has to be the tables' device.
    learning_rate: assign to it to schedule it; a backward applies what its forward found, as FBGEMM does. A captured CUDA
        graph reads, at each replay, what was assigned last.
    """

    def __init__(
        self,
        kind: str = "sgd",
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        states: Sequence[Tensor] = (),
        betas: tuple[float, float] = (0.9, 0.999),
        device: torch.device | str | None = None,
    ) -> None:
        _check_kind(kind)
        if eps < 0:
            raise ValueError(f"FusedOptimizer: eps must not be negative, got {eps}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedOptimizer: betas must lie in [0, 1), got {betas}")
        self.kind = kind
        self.states = list(states)
        self.constants = [eps, *betas] if kind == "adam" else [eps]
        device = device or (self.states[0].device if self.states else "cpu")
        # A tensor, so that a compiled or captured graph reads today's value instead of the one it was traced with.
        self.learning_rate_tensor = torch.tensor([float(learning_rate)], dtype=torch.float32, device=device)
        self._learning_rate = float(learning_rate)
        remember(self.learning_rate_tensor, self._learning_rate)

    @property
    def learning_rate(self) -> float:
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if value != self._learning_rate:
            self._learning_rate = float(value)
            self.learning_rate_tensor.fill_(value)
            remember(self.learning_rate_tensor, self._learning_rate)

    @staticmethod
    def make_states(kind: str, tables: Sequence[Tensor], device: torch.device | str | None = None) -> list[Tensor]:
        """Zero states for those tables. device: of adam's step, by default the tables'; without tables nothing else says it."""
        _check_kind(kind)
        device = device or (tables[0].device if tables else None)
        states = [
            torch.zeros(state_shape(shape, table), dtype=torch.float32, device=table.device)
            for shape in TABLE_STATES[kind]
            for table in tables
        ]
        if kind in KEEPS_STEP:
            states.append(torch.zeros(1, dtype=torch.int64, device=device))
        return states


def state_shape(shape: str, table: Tensor) -> torch.Size:
    return table.shape if shape == "[rows, dim]" else table.shape[:1]


def _check_kind(kind: str) -> None:
    if kind not in TABLE_STATES:
        raise ValueError(f"FusedOptimizer: kind must be one of {', '.join(TABLE_STATES)}, got {kind!r}")
