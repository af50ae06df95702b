"""Time the operators' backends against each other and write rows.

    python -m launch.bench op=embedding_all_to_all ranks=2 device=cpu pooling=[1,20,70] out=results.json
    python -m launch.bench op=all_to_all ranks=2 kib=[16,1024,16384]

Rows: op, backend, device, link, ranks, dtype, the shape's fields, phase (forward | forward_backward | compute_alone |
exchange_alone), ms (median over interleaved rounds of the slowest rank), p10_ms, p90_ms, limit_ms, and the versions.
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fused_ops
from launch.bench.harness import run_on_ranks
from launch.bench.settings import BenchSettings, SettingsError, parse, shapes


def main(words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        print("keys and defaults:", ", ".join(f"{k}={v}" for k, v in vars(BenchSettings()).items()))
        return 0
    try:
        settings = parse(words)
    except SettingsError as error:
        print(f"launch.bench: {error}", file=sys.stderr)
        return 2
    build = importlib.import_module(f"launch.bench.{settings.op}").variants
    facts = _facts(settings, words)
    rows: list[dict[str, Any]] = []
    for shape in shapes(settings):
        timings = run_on_ranks(settings, shape, build)
        block = [{**facts, **shape, **vars(t)} for t in timings]
        _print(settings, shape, block)
        rows += block
    if settings.out:
        path = Path(settings.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{len(rows)} rows in {path}")
    return 0


def _facts(settings: BenchSettings, words: list[str]) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "op": settings.op,
        "device": settings.device,
        "link": "CPU host",
        "ranks": settings.ranks,
        "threads": settings.threads,
        "dtype": settings.dtype,
        "torch": torch.__version__,
        "fusecomm": fused_ops.__version__,
        "commit": commit.stdout.strip() or None,
        "cpu": _cpu_name(),
        "command": "python -m launch.bench " + " ".join(words),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _print(settings: BenchSettings, shape: dict[str, int], rows: list[dict[str, Any]]) -> None:
    """One table a shape: milliseconds, and the ratio to baseline of the same phase."""
    title = f"{settings.op}, {settings.ranks} ranks, CPU host, {settings.dtype}: " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    table = Table(title=title, title_justify="left")
    for name in ("phase", "backend"):
        table.add_column(name)
    for name in ("ms", "p10", "p90", "/ baseline", "limit ms"):
        table.add_column(name, justify="right")
    base = {row["phase"]: row["ms"] for row in rows if row["backend"] == "baseline"}
    for row in sorted(rows, key=lambda r: r["phase"] != "forward"):
        ratio = f"{row['ms'] / base[row['phase']]:.2f}" if row["phase"] in base else ""
        limit = "" if row["limit_ms"] is None else f"{row['limit_ms']:.2f}"
        table.add_row(
            row["phase"],
            row["backend"],
            f"{row['ms']:.3f}",
            f"{row['p10_ms']:.3f}",
            f"{row['p90_ms']:.3f}",
            ratio,
            limit,
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
