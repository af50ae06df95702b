"""Rows of launch.bench, gathered into tables: one line a shape, one column a way to do it, and the ratios between them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FUSED = ("cuda", "triton", "host")
SHAPE_KEYS = ("tables_per_rank", "rows", "dim", "pooling", "batch", "kib", "m", "n", "k", "dtype", "optimizer")
AUTO = "auto"
EMBEDDING = "embedding_all_to_all"
RIVALS = {  # torch's own, which launch.bench times beside baseline
    "baseline_one_shot": "one-shot",
    "baseline_two_shot": "two-shot",
    "baseline_torch_fused": "torch fused",
}
NOT_CAPTURED, TORCH_KERNELS = "†", "‡"
MARKS = {
    NOT_CAPTURED: "timed as plain calls, since it cannot be captured in a CUDA graph",
    TORCH_KERNELS: "torch's kernels, since FBGEMM's do not take these tables",
}


class ResultsError(ValueError):
    """One line: which file is not rows of launch.bench, and why."""


@dataclass(frozen=True)
class Column:
    heading: str
    backend: str
    phase: str


@dataclass(frozen=True)
class Cell:
    ms: float
    mark: str = ""


@dataclass
class Line:
    """One shape; `cells` by column, None where it was not measured."""

    name: str
    shape: str
    cells: list[Cell | None]
    limit_ms: float | None
    ratios: list[float | None]


@dataclass
class Table:
    """A phase of a section."""

    title: str
    columns: list[Column]
    ratio_headings: list[str]
    lines: list[Line] = field(default_factory=list)

    @property
    def has_limit(self) -> bool:
        return any(line.limit_ms is not None for line in self.lines)

    @property
    def marks(self) -> list[str]:
        used = "".join(cell.mark for line in self.lines for cell in line.cells if cell is not None)
        return [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in used]

    def spread(self, heading: str) -> tuple[float, float, float] | None:
        """(least, median, largest) of a ratio's column."""
        at = self.ratio_headings.index(heading)
        known = [ratio for line in self.lines if (ratio := line.ratios[at]) is not None]
        return (min(known), statistics.median(known), max(known)) if known else None


@dataclass
class Section:
    """What was measured with one operator on one machine, over one link, by one number of ranks."""

    title: str
    tables: list[Table]
    facts: dict[str, list[str]]  # version, commit and command of the rows


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path}: {error}") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) and "phase" in row for row in found):
            raise ResultsError(f"{path} does not hold rows of launch.bench")
        rows += found
    if not rows:
        raise ResultsError("there are no rows in these files")
    return rows


def sections(rows: Iterable[dict[str, Any]]) -> list[Section]:
    """In the order of the rows."""
    gathered: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["op"], row.get("gpu") or row.get("cpu"), row["link"], row["ranks"], row.get("mps"))
        gathered.setdefault(key, []).append(row)
    return [_section(found) for found in gathered.values()]


def machine(row: dict[str, Any]) -> str:
    """`one H200, 4 ranks under MPS`, `2 ranks on CPU`."""
    if not row.get("gpu"):
        return f"{row['ranks']} CPU processes"
    cards = row["ranks"] // row["ranks_per_gpu"]
    shared = row["ranks_per_gpu"] > 1
    how = "" if not shared else " taking turns, without MPS" if row["mps"] == "off" else " under MPS"
    gpu = row["gpu"].removeprefix("NVIDIA ")
    return f"{'one' if cards == 1 else cards} {gpu}, {row['ranks']} ranks{how}"


def _section(rows: list[dict[str, Any]]) -> Section:
    first = rows[0]
    facts = {
        key: sorted({str(row[key]) for row in rows if row.get(key) is not None})
        for key in ("commit", "torch", "cuda", "nccl", "cpu", "command")
    }
    backward = "Forward, backward and update" if first["op"] == EMBEDDING else "Forward and backward"
    tables = [
        table
        for phase, title in (("forward", "Forward"), ("forward_backward", backward))
        if (table := _table(rows, phase, title)).lines
    ]
    return Section(
        f"{first['op']}: {machine(first)}, {first['link']}", tables, {key: said for key, said in facts.items() if said}
    )


def _table(rows: list[dict[str, Any]], phase: str, title: str) -> Table:
    columns = _columns(rows, phase)
    fused = next((c for c in columns if c.backend in FUSED and c.phase == phase), None)
    lines: dict[tuple, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in rows:
        key = (row.get("configuration"), *(row.get(name) for name in SHAPE_KEYS))
        lines.setdefault(key, {})[row["backend"], row["phase"]] = row
    against = [c for c in columns if c.phase == phase and c != fused and c.backend != AUTO] if fused else []
    headings = [
        f"fused / {c.heading}" if c.backend not in FUSED else f"{fused.backend} / {c.backend}" for c in against if fused
    ]
    has_limit = fused is not None and phase == "forward"
    auto = next((c for c in columns if c.backend == AUTO), None)
    table = Table(title, columns, headings + ["auto / best"] * (auto is not None) + ["fused / limit"] * has_limit)
    for cells in lines.values():
        if not any(c.phase == phase and (c.backend, c.phase) in cells for c in columns):
            continue
        some = next(iter(cells.values()))
        limit = next((row["limit_ms"] for (_, p), row in cells.items() if p == phase and row["limit_ms"]), None)
        ratios = [_ratio(cells, fused, c) for c in against if fused]
        if auto:
            best = min(
                cells[c.backend, c.phase]["ms"] for c in (fused, *against) if c and (c.backend, c.phase) in cells
            )
            ratios.append(cells[AUTO, phase]["ms"] / best if (AUTO, phase) in cells else None)
        if has_limit and fused:
            own = cells.get((fused.backend, fused.phase))
            ratios.append(own["ms"] / limit if own and limit else None)
        shown = [_cell(cells.get((c.backend, c.phase))) for c in columns]
        table.lines.append(Line(some.get("configuration") or _shape(some), _shape(some), shown, limit, ratios))
    return table


def _columns(rows: list[dict[str, Any]], phase: str) -> list[Column]:
    on_gpu, operator = bool(rows[0].get("gpu")), rows[0]["op"]
    library = "NCCL" if on_gpu else "gloo"
    is_gemm, is_embedding = "gemm" in operator, operator == EMBEDDING
    vendor = "FBGEMM" if is_embedding else "cuBLAS" if on_gpu else "MKL"
    compute = f"{vendor} + " if is_gemm or is_embedding else ""
    possible = [Column(f"fused ({backend})", backend, phase) for backend in FUSED]
    possible += [Column(f"{compute}{library}", "baseline", phase), Column("unfused", "unfused", phase)]
    possible += [Column(f"{vendor} + {name}", backend, phase) for backend, name in RIVALS.items()]
    possible.append(Column(AUTO, AUTO, phase))
    if phase == "forward":
        own = next((b for b in FUSED if any(row["backend"] == b for row in rows)), "cuda")
        possible += [
            Column("GEMM alone" if is_gemm else "lookups alone", own, "compute_alone"),
            Column(f"{vendor} alone", "baseline", "compute_alone"),
            Column("exchange alone", own, "exchange_alone"),
            Column(f"{library} alone", "baseline", "exchange_alone"),
        ]
    there = {(row["backend"], row["phase"]) for row in rows}
    return [column for column in possible if (column.backend, column.phase) in there]


def _cell(row: dict[str, Any] | None) -> Cell | None:
    if row is None:
        return None
    plain = row.get("graph") and not row.get("captured")
    torch_kernels = row["phase"] != "exchange_alone" and row.get("kernels") == "torch"
    return Cell(row["ms"], NOT_CAPTURED * bool(plain) + TORCH_KERNELS * torch_kernels)


def _ratio(cells: dict[tuple[str, str], dict[str, Any]], one: Column, other: Column) -> float | None:
    a, b = cells.get((one.backend, one.phase)), cells.get((other.backend, other.phase))
    return a["ms"] / b["ms"] if a and b else None


def _shape(row: dict[str, Any]) -> str:
    if "kib" in row:
        return f"{row['kib']} KiB, {row['dtype']}"
    if "m" in row:
        return f"M {row['m']}, N {row['n']}, K {row['k']}, {row['dtype']}"
    words = f"{row['tables_per_rank']} tables x {row['rows']:,} x {row['dim']}, {row['pooling']} ids a bag, batch {row['batch']}"
    return f"{words}, {row['dtype']}"
