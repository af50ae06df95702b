"""What kernels know of the local features: rows of int64 words, one a feature."""

from __future__ import annotations

from enum import IntEnum

import triton.language as tl


class Feature(IntEnum):
    TABLE = 0  # address of the table's first row
    ROWS = 1
    DIM = 2
    COLUMN = 3  # first column in the output
    LOCAL_COLUMN = 4  # first column in the packed gradient
    FIRST_ROW = 5  # the table's first row, counted over all tables


FEATURE_WORDS = 8

TABLE = tl.constexpr(int(Feature.TABLE))
ROWS = tl.constexpr(int(Feature.ROWS))
DIM = tl.constexpr(int(Feature.DIM))
COLUMN = tl.constexpr(int(Feature.COLUMN))
LOCAL_COLUMN = tl.constexpr(int(Feature.LOCAL_COLUMN))
FIRST_ROW = tl.constexpr(int(Feature.FIRST_ROW))
WORDS = tl.constexpr(FEATURE_WORDS)
