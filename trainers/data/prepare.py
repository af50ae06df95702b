"""Criteo TSV files to memory-mapped arrays, a file a day, in three phases that each go on where a kill left them:

    parse   lines -> dense, labels, and the 32-bit value of each category in a column file of its own
    count   column files of the training rows -> a map from value to id (left out when hashing)
    map     column files -> ids, row by row

Between phases only files speak, so memory is bounded by block sizes and by the rows of the maps, not by the input.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa

from trainers.data.categories import CategoryCounter, CategoryHash, CategoryMap, build_map
from trainers.data.errors import DataError
from trainers.data.growing import GrowingArray, read_rows
from trainers.data.layout import (
    META_NAME,
    NUM_DENSE,
    NUM_SPARSE,
    Meta,
    Range,
    array_path,
    read_meta,
    write_json,
    write_meta,
)
from trainers.data.options import PrepareOptions
from trainers.data.pool import ordered_map
from trainers.data.tsv import BadLine, parse_block, read_blocks

MAP_BLOCK_ROWS = 1 << 16
COUNT_BLOCK_ROWS = 1 << 20
MAX_EXAMPLES = 20  # malformed lines quoted in meta.json

Progress = Callable[[str, int, int], None]  # phase, done, total


def prepare(
    sources: list[Path],
    directory: Path,
    options: PrepareOptions,
    *,
    max_bad_lines: int = 0,
    workers: int = 2,
    block_bytes: int = 8 << 20,
    checkpoint_bytes: int = 256 << 20,
    overwrite: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Meta:
    """Turn `sources`, one TSV file a day, into arrays in `directory`; return what they hold.

    Called again after it was killed, it goes on and leaves the same bytes as an uninterrupted call; called on finished
    arrays of the same sources and options, it returns at once. DataError: malformed lines beyond `max_bad_lines`, an
    unreadable source, or a directory that holds something else (unless `overwrite`).
    """
    _check_sources(sources)
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / ".prepare.lock", timeout=0)
    try:
        with lock:
            job = _Preparation(sources, directory, options, overwrite, progress)
            if job.finished is None:
                with ThreadPoolExecutor(workers) as job.pool:
                    job.workers = workers
                    job.parse(max_bad_lines, block_bytes, checkpoint_bytes)
                    job.count()
                    job.map(checkpoint_bytes)
                job.finished = job.finish()
            shutil.rmtree(job.work, ignore_errors=True)
            return job.finished
    except filelock.Timeout:
        raise DataError(f"{directory}: another process is preparing data there") from None


@dataclass
class _Day:
    """How far a day has come."""

    offset: int = 0  # bytes of the decompressed file that have been parsed
    line: int = 1  # the next line's number
    rows: int = 0
    parsed: bool = False
    mapped_rows: int = 0


class _Preparation:
    pool: ThreadPoolExecutor
    workers: int

    def __init__(
        self, sources: list[Path], directory: Path, options: PrepareOptions, overwrite: bool, progress: Progress
    ):
        self.sources, self.directory, self.options, self.progress = sources, directory, options, progress
        self.work = directory / ".prepare"
        self.maps = directory / "maps"
        self.described: list[dict[str, Any]] = [
            {"file": s.name, "bytes": s.stat().st_size, "mtime_ns": s.stat().st_mtime_ns} for s in sources
        ]
        self.days = [_Day() for _ in sources]
        self.bad_count = self.positives = 0
        self.bad_examples: list[str] = []
        self.max_ids = [0] * NUM_SPARSE
        self.finished: Meta | None = None
        if overwrite:
            self._clear()
        self._resume()

    def _clear(self) -> None:
        for kind in ("dense", "sparse", "labels"):
            for path in self.directory.glob(f"day_*_{kind}.npy*"):
                path.unlink()
        (self.directory / META_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.maps, ignore_errors=True)

    def _resume(self) -> None:
        if (meta := read_meta(self.directory)) is not None:
            if (meta.sources, meta.options) != (self.described, asdict(self.options)):
                raise DataError(f"{self.directory} holds data of other sources or options; --overwrite replaces it")
            self.finished = meta
            return
        try:
            state = json.loads((self.work / "state.json").read_text())
        except FileNotFoundError:
            if found := sorted(p.name for p in self.directory.glob("day_*.np?")):
                message = (
                    f"{self.directory} holds {found[0]} ... which this command did not write; --overwrite replaces them"
                )
                raise DataError(message) from None
            self.work.mkdir(exist_ok=True)
            return
        if (state["sources"], state["options"]) != (self.described, asdict(self.options)):
            raise DataError(
                f"{self.directory} holds an unfinished preparation of other sources or options; --overwrite starts anew"
            )
        self.days = [_Day(**day) for day in state["days"]]
        self.bad_count, self.bad_examples = state["bad_count"], state["bad_examples"]
        self.positives, self.max_ids = state["positives"], state["max_ids"]

    def _save(self, *arrays: GrowingArray) -> None:
        """A point to go on from: the arrays first, then the state that counts on them."""
        for array in arrays:
            array.sync()
        state = {
            "sources": self.described,
            "options": asdict(self.options),
            "days": [asdict(day) for day in self.days],
            "bad_count": self.bad_count,
            "bad_examples": self.bad_examples,
            "positives": self.positives,
            "max_ids": self.max_ids,
        }
        write_json(self.work / "state.json", state)

    def _part(self, day: int, kind: str) -> Path:
        path = array_path(self.directory, day, kind)
        return path.with_name(path.name + ".part")

    def _column(self, day: int, name: str) -> Path:
        return self.work / f"day_{day}_{name}.npy"

    def parse(self, max_bad_lines: int, block_bytes: int, checkpoint_bytes: int) -> None:
        total = sum(source["bytes"] for source in self.described)
        before = 0
        for i, day in enumerate(self.days):
            if not day.parsed:
                for source_offset in self._parse_day(i, max_bad_lines, block_bytes, checkpoint_bytes):
                    self.progress("parse", before + source_offset, total)
            before += self.described[i]["bytes"]
        self.progress("parse", total, total)

    def _parse_day(self, i: int, max_bad_lines: int, block_bytes: int, checkpoint_bytes: int) -> Iterator[int]:
        """Yields how many bytes of the file, as stored, are done."""
        source, day = self.sources[i], self.days[i]
        dense = GrowingArray(self._part(i, "dense"), np.float32, (NUM_DENSE,), day.rows)
        labels = GrowingArray(self._part(i, "labels"), np.int32, (1,), day.rows)
        missing = GrowingArray(self._column(i, "missing"), np.uint32, (), day.rows)
        columns = [GrowingArray(self._column(i, f"cat_{c}"), np.uint32, (), day.rows) for c in range(NUM_SPARSE)]
        arrays = [dense, labels, missing, *columns]
        saved = day.offset
        blocks = read_blocks(source, block_bytes, day.offset, day.line)
        for block, (rows, bad) in ordered_map(self.pool, parse_block, blocks, 2 * self.workers):
            for line in bad:
                self._bad_line(source, line, max_bad_lines)
            dense.append(rows.dense)
            labels.append(rows.labels[:, None])
            missing.append(rows.missing)
            for column, values in zip(columns, rows.values, strict=True):
                column.append(values)
            day.offset, day.line, day.rows = block.offset, block.next_line, dense.rows
            self.positives += int(rows.labels.sum())
            yield block.source_offset
            if day.offset - saved >= checkpoint_bytes:
                self._save(*arrays)
                saved = day.offset
        if not day.rows:
            raise DataError(f"{source}: no samples")
        day.parsed = True
        self._save(*arrays)
        for array in arrays:
            array.close()

    def _bad_line(self, source: Path, bad: BadLine, allowed: int) -> None:
        self.bad_count += 1
        if len(self.bad_examples) < MAX_EXAMPLES:
            self.bad_examples.append(f"{source.name}:{bad.line}: {bad.reason}")
        if self.bad_count > allowed:
            limit = f"{self.bad_count} malformed lines so far, at most {allowed} are allowed by" if allowed else "see"
            raise DataError(f"{source}:{bad.line}: {bad.reason} ({limit} --max-bad-lines)")

    @property
    def samples(self) -> list[int]:
        return [day.rows for day in self.days]

    def _map_paths(self, column: int) -> tuple[Path, Path]:
        return self.maps / f"cat_{column}_values.npy", self.maps / f"cat_{column}_ids.npy"

    def count(self) -> None:
        if self.options.hash_rows is not None:
            return
        self.maps.mkdir(exist_ok=True)
        ranges = [Range(i, 0, n) for i, n in enumerate(self.samples)]
        if self.options.count_from == "train":
            ranges = self.options.splits(self.samples)["train"]
        for column, _ in ordered_map(self.pool, lambda c: self._count(c, ranges), range(NUM_SPARSE), self.workers):
            self.progress("count", column + 1, NUM_SPARSE)

    def _count(self, column: int, ranges: list[Range]) -> None:
        values_path, ids_path = self._map_paths(column)
        if ids_path.exists():  # written last
            return
        counter = CategoryCounter(self.work)
        for day, first, last in ranges:
            for start in range(first, last, COUNT_BLOCK_ROWS):
                stop = min(start + COUNT_BLOCK_ROWS, last)
                values, missing = self._raw(day, column, start, stop)
                counter.add(values[~missing])
        found = build_map(counter, self.options.min_count, self.options.max_rows[column])
        for path, array in ((values_path, found.values), (ids_path, found.ids)):
            temporary = path.with_name(path.name + ".part")
            with open(temporary, "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def _raw(self, day: int, column: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """uint32 [stop - start] values of a column, and bool: which are missing."""
        values = read_rows(self._column(day, f"cat_{column}"), np.uint32, start, stop)
        missing = read_rows(self._column(day, "missing"), np.uint32, start, stop)
        return values, (missing >> np.uint32(column) & np.uint32(1)).astype(bool)

    def _mappings(self) -> list[CategoryMap | CategoryHash]:
        if self.options.hash_rows is not None:
            return [CategoryHash(rows) for rows in self.options.hash_rows]
        columns = [[np.asarray(np.load(p, mmap_mode="r")) for p in self._map_paths(c)] for c in range(NUM_SPARSE)]
        return [CategoryMap(values, ids) for values, ids in columns]

    def map(self, checkpoint_bytes: int) -> None:
        mappings = self._mappings()
        self.table_rows = [mapping.rows for mapping in mappings]

        def ids(block: Range) -> np.ndarray:
            result = np.empty((block.stop - block.start, NUM_SPARSE), np.int32)
            for column, mapping in enumerate(mappings):
                values, missing = self._raw(block.day, column, block.start, block.stop)
                result[:, column] = mapping(values)
                result[missing, column] = 0
            return result

        done, total = 0, sum(self.samples)
        for i, day in enumerate(self.days):
            if day.mapped_rows < day.rows:
                for rows_mapped in self._map_day(i, ids, checkpoint_bytes):
                    self.progress("map", done + rows_mapped, total)
            for name in ("missing", *(f"cat_{c}" for c in range(NUM_SPARSE))):
                self._column(i, name).unlink(missing_ok=True)
            done += day.rows
        self.progress("map", total, total)

    def _map_day(self, i: int, ids: Callable[[Range], np.ndarray], checkpoint_bytes: int) -> Iterator[int]:
        """Yields how many rows are done."""
        day = self.days[i]
        sparse = GrowingArray(self._part(i, "sparse"), np.int32, (NUM_SPARSE,), day.mapped_rows)
        starts = range(day.mapped_rows, day.rows, MAP_BLOCK_ROWS)
        blocks = [Range(i, start, min(start + MAP_BLOCK_ROWS, day.rows)) for start in starts]
        every = max(1, checkpoint_bytes // (MAP_BLOCK_ROWS * NUM_SPARSE * 4))
        for number, (_, rows) in enumerate(ordered_map(self.pool, ids, blocks, 2 * self.workers), 1):
            sparse.append(rows)
            self.max_ids = np.maximum(self.max_ids, rows.max(0)).tolist()
            day.mapped_rows = sparse.rows
            yield sparse.rows
            if number % every == 0:
                self._save(sparse)
        self._save(sparse)
        sparse.close()

    def finish(self) -> Meta:
        for i in range(len(self.days)):
            for kind in ("dense", "sparse", "labels"):
                if self._part(i, kind).exists():
                    os.replace(self._part(i, kind), array_path(self.directory, i, kind))
        synthetic, bayes_auc = _synthetic(self.sources)
        meta = Meta(
            samples=self.samples,
            splits=self.options.splits(self.samples),
            table_rows=self.table_rows,
            max_ids=self.max_ids,
            positives=self.positives,
            sources=self.described,
            options=asdict(self.options),
            bad_lines={"count": self.bad_count, "examples": self.bad_examples},
            synthetic=synthetic,
            bayes_auc=bayes_auc,
            versions={"numpy": np.__version__, "pyarrow": pa.__version__},
        )
        write_meta(self.directory, meta)
        return meta


def _check_sources(sources: list[Path]) -> None:
    if not sources:
        raise DataError("no input files")
    for source in sources:
        if not source.is_file():
            raise DataError(f"{source}: no such file")


def sidecar(source: Path) -> dict[str, Any] | None:
    """What the generator said of a file (`FILE.meta.json`, or that of FILE without `.gz`)."""
    for name in dict.fromkeys((source.name, source.name.removesuffix(".gz"))):
        path = source.with_name(name + ".meta.json")
        if path.is_file():
            return json.loads(path.read_text())
    return None


def _synthetic(sources: list[Path]) -> tuple[bool, float | None]:
    """Whether any source is generated, and the Bayes AUC if all are, from one distribution."""
    found = [sidecar(source) or {} for source in sources]
    known = {about.get("bayes_auc") for about in found}
    return any(bool(about.get("synthetic")) for about in found), known.pop() if len(known) == 1 else None
