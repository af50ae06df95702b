"""A directory of Criteo arrays, mapped into memory: this project's own, or MLPerf's with or without multi-hot ids."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from trainers.data.errors import DataError
from trainers.data.layout import NUM_DENSE, NUM_SPARSE, SPLITS, Range, array_path, days_in, read_meta, split_ranges

_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field


class Day:
    """One day's arrays. `sparse` is int32 [n, 26], or for multi-hot 26 integer arrays [n, hot_i]."""

    def __init__(self, directory: Path, day: int, multi_hot: bool):
        self.dense = _map_npy(array_path(directory, day, "dense"), NUM_DENSE, "f")
        self.labels = _map_npy(array_path(directory, day, "labels"), 1, "iuf")
        self.sparse_path = array_path(directory, day, "sparse_multi_hot" if multi_hot else "sparse")
        self.sparse: np.ndarray | None = None
        self.multi_hot: list[np.ndarray] | None = None
        if multi_hot:
            self.multi_hot = map_npz(self.sparse_path)
            lengths = {len(array) for array in self.multi_hot}
        else:
            self.sparse = _map_npy(self.sparse_path, NUM_SPARSE, "iu")
            lengths = {len(self.sparse)}
        self.samples = len(self.labels)
        if lengths | {len(self.dense)} != {self.samples}:
            raise DataError(
                f"{directory}: day {day} has {self.samples} labels, {len(self.dense)} dense rows and "
                f"{sorted(lengths)} sparse rows; they must be equal"
            )

    def hot_sizes(self) -> list[int]:
        return [1] * NUM_SPARSE if self.multi_hot is None else [array.shape[1] for array in self.multi_hot]

    def ids(self, rows: np.ndarray) -> list[np.ndarray]:
        """26 arrays [len(rows), hot_i]."""
        if self.multi_hot is not None:
            return [array[rows] for array in self.multi_hot]
        assert self.sparse is not None
        return list(self.sparse[rows].T[:, :, None])


class Dataset:
    """All days of a directory and the rows of each split."""

    def __init__(self, directory: Path, multi_hot: bool = False):
        if not directory.is_dir():
            raise DataError(f"{directory}: no such directory; `python -m launch.prepare_criteo` makes one")
        self.directory = directory
        self.meta = read_meta(directory)
        found = days_in(directory)
        if not found:
            unfinished = (directory / ".prepare").exists()
            why = (
                "its preparation was not finished; run that command again"
                if unfinished
                else "expected day_<i>_labels.npy"
            )
            raise DataError(f"{directory} holds no prepared data: {why}")
        self.days = [Day(directory, day, multi_hot) for day in found]
        samples = [day.samples for day in self.days]
        if self.meta is not None and self.meta.samples != samples:
            raise DataError(f"{directory}: the arrays have {samples} rows a day, meta.json says {self.meta.samples}")
        self.splits: dict[str, list[Range]] = self.meta.splits if self.meta is not None else split_ranges(samples)
        self.hot_sizes = self.days[0].hot_sizes()
        for number, day in enumerate(self.days):
            if day.hot_sizes() != self.hot_sizes:
                raise DataError(
                    f"{day.sparse_path}: day {number} has {day.hot_sizes()} ids a feature, day 0 has {self.hot_sizes}"
                )

    def split_samples(self) -> dict[str, int]:
        return {split: sum(r.stop - r.start for r in self.splits[split]) for split in SPLITS}


def _map_npy(path: Path, columns: int, kinds: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except ValueError as error:
        raise DataError(f"{path}: not a .npy array ({error})") from None
    if array.ndim == 1 and columns == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != columns or array.dtype.kind not in kinds:
        allowed = {"f": "floating-point", "iu": "integer", "iuf": "number"}[kinds]
        raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected a {allowed} array [n, {columns}]")
    return np.asarray(array)


def map_npz(path: Path) -> list[np.ndarray]:
    """Map the arrays "0" .. "25" of an uncompressed `.npz` where they lie in the file."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            expected = [str(i) for i in range(NUM_SPARSE)]
            if set(members) != set(expected):
                raise DataError(f"{path}: arrays {sorted(members)}, expected 0 .. {NUM_SPARSE - 1}")
            return [_map_member(path, file, members[name]) for name in expected]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: not a .npz file ({error})") from None


def _map_member(path: Path, file, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(
            f"{path}: array {member.filename} is compressed and cannot be mapped; write it with numpy.savez instead of "
            "numpy.savez_compressed"
        )
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    file.seek(member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ValueError as error:
        raise DataError(f"{path}: array {member.filename} is no .npy array ({error})") from None
    if len(shape) != 2 or dtype.kind not in "iu" or fortran:
        order = " in Fortran order" if fortran else ""
        raise DataError(f"{path}: array {member.filename} is {dtype} {list(shape)}{order}, expected integers [n, hot]")
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", file.tell(), shape))
