"""Arrays that grow by rows on disk and survive a kill: `.npy` files whose header is written last."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np

HEADER_BYTES = 128  # numpy leaves room for any first dimension, so the header's size is the same before and after


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES, len(header)
    return header


class GrowingArray:
    """An array [rows, *row_shape] in a `.npy` file, appended to. Opening it at fewer rows than the file has cuts it."""

    def __init__(self, path: Path, dtype: type, row_shape: tuple[int, ...], rows: int):
        self._dtype, self._row_shape = np.dtype(dtype), row_shape
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by `close`)
        size = HEADER_BYTES + rows * self._dtype.itemsize * int(np.prod(row_shape))
        if rows and os.fstat(self._file.fileno()).st_size < size:
            raise OSError(f"{path} is shorter than the {rows} rows it should hold; prepare again with --overwrite")
        self._file.truncate(size)
        self._file.seek(size)
        self.rows = rows

    def append(self, array: np.ndarray) -> None:
        assert (array.dtype, array.shape[1:]) == (self._dtype, self._row_shape), (array.dtype, array.shape)
        self._file.write(np.ascontiguousarray(array).data)
        self.rows += len(array)

    def sync(self) -> None:
        """Bring everything appended, and a header that says so, to the disk."""
        self._file.seek(0)
        self._file.write(npy_header((self.rows, *self._row_shape), self._dtype))
        self._file.seek(0, os.SEEK_END)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path, dtype: type, start: int, stop: int) -> np.ndarray:
    """Rows of a one-dimensional GrowingArray, read (not mapped, so that resident memory stays what is asked for)."""
    array: np.ndarray = np.fromfile(path, dtype, stop - start, offset=HEADER_BYTES + start * np.dtype(dtype).itemsize)
    if len(array) != stop - start:
        raise OSError(f"{path} is shorter than the {stop} rows it should hold; prepare again with --overwrite")
    return array
