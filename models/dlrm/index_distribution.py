"""The way of categorical indices from the ranks that read samples to the ranks that own tables.

TorchRec's KeyedJaggedTensor All-to-All in its three steps, so that a loop can lay a batch's steps under another batch's
compute. The same under every `comm`.

    start(features)           sizes leave (asynchronous)
    send(pending)             sizes are here: values leave (asynchronous)
    finish(pending)           values are here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

OUT_OF_RANGE = ("error", "clamp", "hash")


@dataclass
class DistributedIndices:
    """Indices of the global batch for this rank's tables.

    `indices`: one KeyedJaggedTensor a sharding group, keys = this rank's features, stride = sum(batch_sizes), samples
    ordered by the rank that reads them. `batch_sizes`: samples of every rank in this step.
    """

    context: EmbeddingBagCollectionContext
    indices: KJTList
    batch_sizes: list[int]
    batch_size: int  # this rank's


@dataclass
class Pending:
    context: EmbeddingBagCollectionContext
    awaitable: Any
    batch_size: int


def rows_of_features(collection: ShardedEmbeddingBagCollection) -> dict[str, int]:
    return {f: table.num_embeddings for table in collection._embedding_bag_configs for f in table.feature_names}


def check_range(indices: KJTList, rows: dict[str, int]) -> None:
    """ValueError naming table rows, feature and value of the first index outside its table."""
    for kjt in indices:
        for key in kjt.keys():  # noqa: SIM118 - no mapping
            values = kjt[key].values()
            bad = values[(values < 0) | (values >= rows[key])]
            if bad.numel():
                raise ValueError(
                    f"feature {key} has index {int(bad[0])}, its table has {rows[key]} rows ({bad.numel()} such indices "
                    f"in this batch); model.out_of_range=clamp or hash would bring them into range"
                )


class IndexDistribution:
    """Brings indices to a sharded collection.

    `out_of_range` is applied here for "clamp" (to the nearest row) and "hash" (modulo the rows), before indices travel.
    Under "error" the lookups refuse, and `check_range` says what they refused. `guard`: they are kernels of a GPU that check
    nothing, so indices are clamped here, and `check` raises what was out of range, naming it, when the step is over.
    """

    def __init__(
        self, collection: ShardedEmbeddingBagCollection, out_of_range: str = "error", guard: bool = False
    ) -> None:
        if out_of_range not in OUT_OF_RANGE:
            raise ValueError(f"model.out_of_range is {out_of_range!r}; allowed: {', '.join(OUT_OF_RANGE)}")
        self.collection = collection
        self.out_of_range = out_of_range
        self._guard = guard and out_of_range == "error"
        self._given: list[tuple[KeyedJaggedTensor, torch.Tensor]] = []  # and how many of its indices were clamped
        self._rows = rows_of_features(collection)

    def start(self, features: KeyedJaggedTensor) -> Pending:
        context = self.collection.create_context()
        if self._guard:
            given, features = features, self._bring_into_range(features, clamp=True)
            self._given.append((given, (given.values() != features.values()).sum()))
        elif self.out_of_range != "error":
            features = self._bring_into_range(features, clamp=self.out_of_range == "clamp")
        return Pending(context, self.collection.input_dist(context, features), features.stride())

    def send(self, pending: Pending) -> Pending:
        return Pending(pending.context, pending.awaitable.wait(), pending.batch_size)

    def finish(self, pending: Pending) -> DistributedIndices:
        indices = pending.awaitable.wait()
        batch_sizes = list(pending.context.sharding_contexts[0].batch_size_per_rank)
        # One process distributes nothing, and TorchRec then leaves the sizes out.
        return DistributedIndices(
            pending.context, indices, batch_sizes or [pending.batch_size], batch_size=pending.batch_size
        )

    def check(self) -> None:
        """Under `guard`: ValueError where a batch since the last call had an index outside its table. Waits for the device."""
        given, self._given = self._given, []
        for features, clamped in given:
            if int(clamped):
                check_range(KJTList([features]), self._rows)

    def _bring_into_range(self, features: KeyedJaggedTensor, clamp: bool) -> KeyedJaggedTensor:
        """A copy with every value inside its table."""
        values = features.values()
        keys = features.keys()
        rows = torch.tensor([self._rows[key] for key in keys], dtype=values.dtype)
        # On the host, which knows the lengths: the device would have to be waited for.
        rows = rows.repeat_interleave(torch.tensor(features.length_per_key())).to(values.device, non_blocking=True)
        values = torch.minimum(values.clamp(min=0), rows - 1) if clamp else torch.remainder(values, rows)
        return KeyedJaggedTensor(
            keys=keys, values=values, lengths=features.lengths(), weights=features.weights_or_none()
        )
