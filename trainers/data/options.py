"""What a preparation may be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from trainers.data.errors import DataError
from trainers.data.layout import NUM_SPARSE, Range, split_ranges


@dataclass(frozen=True)
class PrepareOptions:
    """What decides the arrays' content. Rows are one a feature, id 0 (missing, rare, unseen) included."""

    min_count: int = 1  # a value seen less often has id 0
    max_rows: list[int] = field(default_factory=lambda: [40_000_000] * NUM_SPARSE)
    hash_rows: list[int] | None = None  # no maps: ids are 1 + value mod (rows - 1)
    count_from: str = "train"  # train | all: the rows whose values get ids
    fractions: list[str] | None = None  # train, val, test; None: the last day (or last seventh) is held out

    def __post_init__(self) -> None:
        for name, rows in (("max_rows", self.max_rows), ("hash_rows", self.hash_rows)):
            if rows is not None and (len(rows) != NUM_SPARSE or min(rows) < 2 or max(rows) >= 1 << 31):
                raise DataError(f"{name}: {NUM_SPARSE} numbers from 2 to 2^31 - 1 are needed, not {rows}")
        if self.min_count < 1:
            raise DataError(f"min_count: {self.min_count}, allowed is 1 or more")
        if self.hash_rows is not None and self.min_count > 1:
            raise DataError("hash_rows and min_count exclude each other: hashing counts nothing")
        if self.count_from not in ("train", "all"):
            raise DataError(f"count_from: {self.count_from!r}, allowed are train and all")
        if self.fractions is not None:
            shares = [Fraction(f) for f in self.fractions]
            if len(shares) != 3 or min(shares) < 0 or sum(shares) != 1:
                raise DataError(f"fractions: {', '.join(self.fractions)}; three shares that add up to 1 are needed")

    def splits(self, samples: list[int]) -> dict[str, list[Range]]:
        return split_ranges(samples, None if self.fractions is None else tuple(map(Fraction, self.fractions)))
