"""Random Criteo lines and a plain Python preparation of them: what the fast one must equal."""

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np

from trainers.data.layout import array_path


def random_lines(count: int, seed: int = 0, digits: int = 8) -> list[str]:
    """Lines with skewed categories and empty fields; hexadecimal strings are padded to `digits`."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        fields = [str(rng.randrange(2))]
        fields += ["" if rng.random() < 0.3 else str(int(rng.paretovariate(0.8)) - 4) for _ in range(13)]
        for feature in range(26):
            value = int(rng.paretovariate(0.6)) * (feature + 1) * 2654435761 % 2**32 if rng.random() > 0.05 else 0
            fields.append("" if rng.random() < 0.2 else f"{value:0{digits}x}")
        lines.append("\t".join(fields))
    return lines


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def naive(days: list[list[str]], train: list[tuple[int, int]], min_count: int = 1, max_rows: int = 2**31 - 1):
    """(dense, sparse, labels) a day and rows a table; values are counted in the first train[d][1] rows of day d."""
    rows = [[line.split("\t") for line in lines] for lines in days]
    maps = []
    for feature in range(26):
        counts = Counter(
            int(fields[14 + feature], 16)
            for day, (start, stop) in zip(rows, train, strict=True)
            for fields in day[start:stop]
            if fields[14 + feature]
        )
        kept = sorted((-count, value) for value, count in counts.items() if count >= min_count)[: max_rows - 1]
        maps.append({value: number for number, (_, value) in enumerate(kept, 1)})
    arrays = []
    for day in rows:
        dense = [[math.log(max(int(x or 0), -2) + 3) for x in fields[1:14]] for fields in day]
        sparse = [[maps[i].get(int(x, 16), 0) if x else 0 for i, x in enumerate(fields[14:])] for fields in day]
        labels = [[int(fields[0])] for fields in day]
        arrays.append((np.array(dense, np.float32), np.array(sparse, np.int32), np.array(labels, np.int32)))
    return arrays, [len(m) + 1 for m in maps]


def load(directory: Path, day: int) -> tuple[np.ndarray, ...]:
    return tuple(np.load(array_path(directory, day, kind)) for kind in ("dense", "sparse", "labels"))


def save(directory: Path, samples: list[int], rows: int = 100, seed: int = 0) -> Path:
    """Arrays as other tools write them, no meta.json. dense[:, 0] numbers the samples through all days."""
    rng = np.random.default_rng(seed)
    directory.mkdir(exist_ok=True)
    first = 0
    for day, count in enumerate(samples):
        dense = rng.normal(size=(count, 13)).astype(np.float32)
        dense[:, 0] = np.arange(first, first + count)
        np.save(array_path(directory, day, "dense"), dense)
        np.save(array_path(directory, day, "sparse"), rng.integers(0, rows, (count, 26), dtype=np.int32))
        np.save(array_path(directory, day, "labels"), rng.integers(0, 2, (count, 1), dtype=np.int32))
        first += count
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    files = (p for p in directory.rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}
