"""What every rank must know of an `embedding_all_to_all`."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class EmbeddingLayout:
    """Who owns which columns of the output, and how many samples each rank has. Equal on all ranks (W in the group).

    feature_dims[r][f]: width of rank r's f-th local feature; an empty list is a rank without tables.
    feature_columns[r][f]: its first column in the output. The features tile [0, total_dim): no hole, no overlap.
    batch_sizes[r]: samples of rank r; zero is legal. The global batch is their concatenation in rank order.
    total_dim: columns of the output.
    dtype: of the tables and of the output: float32, float16 or bfloat16. A rank without tables has no other way to know.

    Raises ValueError for anything else.
    """

    feature_dims: Sequence[Sequence[int]]
    feature_columns: Sequence[Sequence[int]]
    batch_sizes: Sequence[int]
    total_dim: int
    dtype: torch.dtype = torch.float32
    # One list of integers, which is all that an operator's schema can hold; `decode` reads it. Made at once, since a compiler
    # that traces a call may not be able to.
    encoded: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_dims", tuple(tuple(dims) for dims in self.feature_dims))
        object.__setattr__(self, "feature_columns", tuple(tuple(columns) for columns in self.feature_columns))
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        if self.dtype not in DTYPES:
            raise ValueError(f"EmbeddingLayout: dtype must be one of {', '.join(map(str, DTYPES))}, got {self.dtype}")
        world = len(self.batch_sizes)
        if len(self.feature_dims) != world or len(self.feature_columns) != world:
            raise ValueError(
                f"EmbeddingLayout: batch_sizes has {world} ranks, feature_dims {len(self.feature_dims)}, "
                f"feature_columns {len(self.feature_columns)}; they must agree"
            )
        if any(size < 0 for size in self.batch_sizes):
            raise ValueError(f"EmbeddingLayout: batch_sizes must not be negative, got {list(self.batch_sizes)}")
        _check_tiling(self.feature_dims, self.feature_columns, self.total_dim)
        counts = [len(dims) for dims in self.feature_dims]
        dims = [d for rank in self.feature_dims for d in rank]
        columns = [c for rank in self.feature_columns for c in rank]
        encoded = [self.world, self.total_dim, *self.batch_sizes, *counts, *dims, *columns]
        object.__setattr__(self, "encoded", encoded)

    @property
    def world(self) -> int:
        return len(self.batch_sizes)

    @property
    def global_batch(self) -> int:
        return sum(self.batch_sizes)

    def local_dim(self, rank: int) -> int:
        """Columns that rank's features produce."""
        return sum(self.feature_dims[rank])

    @functools.cached_property
    def facts(self) -> tuple[str, ...]:
        """What ranks compare, short enough to be read in an error."""
        columns = repr((self.feature_dims, self.feature_columns)).encode()
        return (
            str(self.dtype),
            f"batch_sizes {list(self.batch_sizes)}",
            f"total_dim {self.total_dim}",
            f"features a rank {[len(dims) for dims in self.feature_dims]}",
            f"columns {hashlib.blake2b(columns, digest_size=8).hexdigest()}",
        )

    @classmethod
    def table_wise(
        cls, feature_dims: Sequence[Sequence[int]], batch_sizes: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> EmbeddingLayout:
        """The layout whose columns follow the ranks: rank 0's features, rank 1's, and so on."""
        columns, at = [], 0
        for dims in feature_dims:
            columns.append([at + sum(dims[:f]) for f in range(len(dims))])
            at += sum(dims)
        return cls(feature_dims, columns, batch_sizes, at, dtype)

    @staticmethod
    def decode(encoded: Sequence[int], dtype: torch.dtype) -> EmbeddingLayout:
        return _decode(tuple(encoded), dtype)


@functools.lru_cache(maxsize=1024)
def _decode(encoded: tuple[int, ...], dtype: torch.dtype) -> EmbeddingLayout:
    world, total_dim = encoded[:2]
    batch_sizes, counts = encoded[2 : 2 + world], encoded[2 + world : 2 + 2 * world]
    rest = encoded[2 + 2 * world :]
    dims, columns = rest[: sum(counts)], rest[sum(counts) :]
    ends = list(itertools.accumulate(counts, initial=0))
    return EmbeddingLayout(
        [dims[a:b] for a, b in itertools.pairwise(ends)],
        [columns[a:b] for a, b in itertools.pairwise(ends)],
        batch_sizes,
        total_dim,
        dtype,
    )


@functools.lru_cache(maxsize=1024)
def _check_tiling(
    feature_dims: tuple[tuple[int, ...], ...], feature_columns: tuple[tuple[int, ...], ...], total_dim: int
) -> None:
    pieces = []
    for rank, (dims, columns) in enumerate(zip(feature_dims, feature_columns, strict=True)):
        if len(dims) != len(columns):
            raise ValueError(
                f"EmbeddingLayout: rank {rank} has {len(dims)} feature_dims and {len(columns)} feature_columns"
            )
        pieces += [(column, dim, rank, f) for f, (dim, column) in enumerate(zip(dims, columns, strict=True))]
    expected, before = 0, "the start"
    for column, dim, rank, f in sorted(pieces):
        name = f"feature {f} of rank {rank}"
        if dim < 1:
            raise ValueError(f"EmbeddingLayout: {name} has width {dim}; it must be at least 1")
        if column != expected:
            kind = "overlap" if column < expected else "hole"
            raise ValueError(
                f"EmbeddingLayout: {kind} between {before} and {name}: it starts at column {column}, expected {expected}; "
                f"the features must tile [0, {total_dim})"
            )
        expected, before = column + dim, name
    if expected != total_dim:
        raise ValueError(f"EmbeddingLayout: the features cover {expected} columns, total_dim is {total_dim}")
