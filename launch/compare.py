"""Compares runs: a table, `summary.json` and one self-contained page, from any run or sweep directories.

python -m launch.compare RUN_DIR... [--out DIR]
python -m launch.compare --quickstart [--ranks N] [--out DIR] [OVERRIDE...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launch.page.comparison import Comparison, compare
from launch.page.html import render
from launch.page.runs import find_runs
from launch.page.table import json_rows, print_table
from launch.quickstart import TrainingError, train_both_modes
from trainers.loggers import strict_json

DEFAULT_OUT = Path("outputs/compare")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when a page was written, 1 when nothing could be compared or a quickstart run failed, 2 for bad
    usage.
    """
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ranks < 1:
        parser.error(f"--ranks is {arguments.ranks}; it must be 1 or more")
    console = Console()
    if arguments.quickstart:
        bad = [text for text in arguments.targets if "=" not in text]
        if bad:
            parser.error(f"with --quickstart, arguments are Hydra overrides such as trainer.steps=100; got {bad[0]!r}")
        try:
            directories = train_both_modes(arguments.out, arguments.ranks, arguments.targets)
        except TrainingError as failure:
            print(f"launch.compare: {failure}", file=sys.stderr)
            return 1
    else:
        if not arguments.targets:
            parser.error("name at least one run or sweep directory, or use --quickstart")
        directories = [Path(text) for text in arguments.targets]
    return show(directories, arguments.out, console)


def show(directories: Sequence[Path], out: Path, console: Console) -> int:
    """Compare the runs in `directories`, print the table and write the page; returns the exit code."""
    comparison = compare(find_runs(directories))
    print_table(comparison, console)
    if not any(row.run.summary for row in comparison.rows):
        print("launch.compare: none of these runs has a record, so no page was written", file=sys.stderr)
        return 1
    page = write(comparison, out)
    console.print(
        f"\nPage: [bold]{page}[/]   figures: {page.with_name('summary.json')}", highlight=False, soft_wrap=True
    )
    return 0


def write(comparison: Comparison, out: Path) -> Path:
    """Write `out/index.html` and `out/summary.json`; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(render(comparison, datetime.datetime.now().strftime("%-d %B %Y, %H:%M")), encoding="utf-8")
    rows = [json.loads(strict_json.dumps(row)) for row in json_rows(comparison)]
    (out / "summary.json").write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="RUN_DIR", help="run or sweep directories; with --quickstart, overrides"
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"where the page goes (default {DEFAULT_OUT})")
    parser.add_argument(
        "--quickstart",
        action="store_true",
        help="first train in both modes: dlrm_tiny on synthetic data, or what the overrides say",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of a quickstart run (default 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
