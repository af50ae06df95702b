"""`python -m launch.generate_criteo`: write generated click logs in Criteo's TSV format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launch.progress import ProgressBar
from trainers.data.errors import DataError
from trainers.data.generate import generate, scaled_rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.generate_criteo",
        description="Write synthetic click logs in Criteo's TSV format, with a known Bayes AUC in FILE.meta.json.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the TSV file to write")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="lines to write (about 225 bytes each)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which distribution and draws (default 0)")
    parser.add_argument(
        "--first-sample",
        type=int,
        default=0,
        metavar="K",
        help="begin at sample K of the seed's stream: files that continue one another are days",
    )
    parser.add_argument(
        "--rows-scale",
        type=float,
        default=0.001,
        metavar="X",
        help="distinct category values as a share of Criteo Kaggle's (default 0.001)",
    )
    options = parser.parse_args(arguments)
    try:
        with ProgressBar() as bar:
            about = generate(
                options.out,
                options.samples,
                options.seed,
                scaled_rows(options.rows_scale),
                first_sample=options.first_sample,
                progress=lambda done, total: bar("generate", done, total),
            )
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.out}: {about['samples']} synthetic samples, {about['positives']} positive, "
        f"Bayes AUC {about['bayes_auc']:.4f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
