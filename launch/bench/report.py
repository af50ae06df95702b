"""A block of rows as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

NOT_IN_TITLE = ("configuration", "dtype", "optimizer")


def print_block(rows: list[dict[str, Any]], shape_keys: list[str], console: Console) -> None:
    """One table a shape: milliseconds, and the ratio to baseline of the same phase."""
    first = rows[0]
    named = f"{first['configuration']}: " if first.get("configuration") else ""
    shape = ", ".join(f"{key} {first[key]}" for key in shape_keys if key not in NOT_IN_TITLE)
    title = f"{named}{first['op']}, {first['ranks']} ranks, {first['link']}, {first['dtype']}: {shape}"
    table = Table(title=title, title_justify="left")
    for name in ("phase", "backend"):
        table.add_column(name)
    for name in ("ms", "p10", "p90", "/ baseline", "limit ms"):
        table.add_column(name, justify="right")
    base = {row["phase"]: row["ms"] for row in rows if row["backend"] == "baseline"}
    for row in sorted(rows, key=lambda r: r["phase"] != "forward"):
        ratio = f"{row['ms'] / base[row['phase']]:.2f}" if row["phase"] in base else ""
        limit = "" if row["limit_ms"] is None else f"{row['limit_ms']:.3f}"
        table.add_row(
            row["phase"],
            row["backend"],
            f"{row['ms']:.3f}",
            f"{row['p10_ms']:.3f}",
            f"{row['p90_ms']:.3f}",
            ratio,
            limit,
        )
    console.print(table)
