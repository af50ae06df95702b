"""Makes a page from rows of launch.bench.

    python -m launch.bench_page docs/results/h200/bench_*.json --out docs/results/h200/index.html

The suffix of --out decides: .html (tables and charts, one file that needs no network) or .md (tables).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.bench_page.render import TEMPLATES, render
from launch.bench_page.results import ResultsError, read, sections


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the page was written, 2 for files or arguments that won't do."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.bench_page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS.json", help="what launch.bench wrote with out=...")
    parser.add_argument("--out", type=Path, required=True, metavar="PAGE", help="where the page goes: .html or .md")
    arguments = parser.parse_args(argv)
    if arguments.out.suffix not in TEMPLATES:
        parser.error(f"--out must end in {' or '.join(TEMPLATES)}, got {arguments.out}")
    try:
        found = sections(read(arguments.rows))
    except ResultsError as error:
        print(f"launch.bench_page: {error}", file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(render(found, arguments.rows, arguments.out), encoding="utf-8")
    print(f"page: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
