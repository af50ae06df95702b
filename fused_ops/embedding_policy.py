"""A call of `embedding_all_to_all` as `comm="auto"` sees it: the same in forward and in every phase of its backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from fused_ops.embedding_inputs import EmbeddingInputs
from fused_ops.policy import Call, bucket


def describe(
    inputs: EmbeddingInputs, channel: int, run: Callable[[ModuleType], object] | None = None
) -> Callable[[], Call]:
    """`run`: the forward on a backend's module; a backward has none."""

    def call() -> Call:
        layout = inputs.layout
        features = sum(len(dims) for dims in layout.feature_dims)
        sizes = ((layout.global_batch, "samples"), (features, "features"), (layout.total_dim, "columns"))
        shape = ", ".join(bucket(count, unit) for count, unit in sizes)
        return Call(shape, layout.dtype, channel, load=inputs.indices.numel(), run=run)

    return call
