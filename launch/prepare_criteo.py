"""`python -m launch.prepare_criteo`: Criteo TSV files to the memory-mapped arrays that training reads."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path

import yaml

from launch.progress import ProgressBar
from trainers.data.errors import DataError
from trainers.data.layout import NUM_SPARSE, Meta
from trainers.data.prepare import PrepareOptions, prepare

DESCRIPTION = """\
Turn Criteo click logs (Kaggle or Terabyte TSV: label, 13 integers, 26 hexadecimal categories; plain or gzip; one file a
day, in order) into DIR/day_<i>_{dense,sparse,labels}.npy and DIR/meta.json. Killed in the middle, the same command goes
on where it was."""


def rows_argument(text: str) -> list[int]:
    """26 numbers from one number, from 26 with commas, or from `table_rows` of a model's YAML file."""
    if text.endswith((".yaml", ".yml")):
        try:
            content = yaml.safe_load(Path(text).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None
        rows = content.get("table_rows") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(r, int) for r in rows):
            raise argparse.ArgumentTypeError(f"{text} has no list of numbers named table_rows")
    else:
        try:
            rows = [int(part) for part in text.replace("_", "").split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number, {NUM_SPARSE} numbers, nor a YAML file"
            ) from None
        if len(rows) == 1:
            rows *= NUM_SPARSE
    if len(rows) != NUM_SPARSE:
        raise argparse.ArgumentTypeError(f"{text}: {len(rows)} numbers, expected 1 or {NUM_SPARSE}")
    return rows


def fractions_argument(text: str) -> list[str]:
    try:
        return [str(Fraction(part.strip())) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r}: three shares such as 0.8,0.1,0.1 or 6/7,1/14,1/14") from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed is 1 or more")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, allowed is 0 or more")
    return int(text)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.prepare_criteo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="TSV files, one a day")
    add("--out", type=Path, required=True, metavar="DIR", help="where the arrays go")
    add("--min-count", type=positive, default=1, metavar="N", help="values seen less often share id 0 (default 1)")
    add(
        "--max-rows",
        type=rows_argument,
        default=[40_000_000] * NUM_SPARSE,
        metavar="ROWS",
        help="cap on a table's rows: a number, 26 with commas, or a model YAML with table_rows (default 40000000)",
    )
    add("--hash-rows", type=rows_argument, metavar="ROWS", help="hash into tables of so many rows instead of counting")
    add(
        "--count-from",
        choices=("train", "all"),
        default="train",
        help="rows whose values get ids: those of the training split (default) or all, as published row counts do",
    )
    add(
        "--splits",
        type=fractions_argument,
        metavar="TRAIN,VAL,TEST",
        help="shares of all rows, in order (default: of several days the last is half val, half test; of one, its "
        "last seventh)",
    )
    add(
        "--max-bad-lines",
        type=count,
        default=0,
        metavar="N",
        help="leave out up to N malformed lines and report how many (default 0: stop at the first)",
    )
    add("--workers", type=positive, default=2, metavar="N", help="threads (default 2)")
    add("--block-mb", type=positive, default=8, metavar="N", help="MB of text parsed at a time by a thread (default 8)")
    add(
        "--checkpoint-mb",
        type=positive,
        default=256,
        metavar="N",
        help="MB of text after which progress is kept for a restart (default 256)",
    )
    add("--overwrite", action="store_true", help="replace what DIR holds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        options = PrepareOptions(args.min_count, args.max_rows, args.hash_rows, args.count_from, args.splits)
        with ProgressBar() as bar:
            meta = prepare(
                args.inputs,
                args.out,
                options,
                max_bad_lines=args.max_bad_lines,
                workers=args.workers,
                block_bytes=args.block_mb << 20,
                checkpoint_bytes=args.checkpoint_mb << 20,
                overwrite=args.overwrite,
                progress=bar,
            )
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(summary(args.out, meta))
    return 0


def summary(directory: Path, meta: Meta) -> str:
    splits = ", ".join(f"{split} {sum(r.stop - r.start for r in ranges)}" for split, ranges in meta.splits.items())
    lines = [
        f"{directory}: {sum(meta.samples)} samples in {len(meta.samples)} day(s) ({splits}), {meta.positives} positive",
        f"table rows: {','.join(map(str, meta.table_rows))}",
    ]
    if meta.bad_lines["count"]:
        lines += [f"{meta.bad_lines['count']} malformed lines left out:", *meta.bad_lines["examples"]]
        if meta.bad_lines["count"] > len(meta.bad_lines["examples"]):
            lines.append("...")
    if meta.synthetic:
        known = "unknown" if meta.bayes_auc is None else f"{meta.bayes_auc:.4f}"
        lines.append(f"synthetic data, Bayes AUC {known}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
