"""The comparison as a table in the terminal and as the rows of `summary.json` and of the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from launch.page.comparison import EARLY_STEPS, LOSS_TOLERANCE, Comparison, Row

ABSENT = "\N{EN DASH}"
STEP_TIME = (
    *("step_ms", "data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms", "samples_per_s"),
    *("tokens_per_s", "mfu", "step_reduction_percent"),
)


@dataclass(frozen=True)
class Column:
    """One figure of a row, its heading and how it is written. `help` explains it to a newcomer."""

    key: str
    heading: str
    text: Callable[[Row], str]
    help: str
    is_number: bool = True


def number(value: Any, digits: int) -> str:
    """A figure for people; a dash where it is unknown, `nan` where it is not a number."""
    if value is None:
        return ABSENT
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}f}"


def signed_percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:+.1f} %".replace("-", "\N{MINUS SIGN}")


def small(value: float | None) -> str:
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.1e}"


def _figure(key: str, heading: str, digits: int, text: str) -> Column:
    return Column(key, heading, lambda row: number(row.run[key], digits), text)


def _reduction(row: Row) -> str:
    if row.is_baseline:
        return "reference" if row.run.status == "ok" else ABSENT
    return signed_percent(row.step_reduction) + (" ~" if row.step_reduction is not None and row.within_spread else "")


COLUMNS = (
    Column("label", "run", lambda row: row.label, "What sets the run apart from the others.", is_number=False),
    Column(
        "status",
        "status",
        lambda row: row.run.status,
        "ok, failed, unfinished, missing or unreadable.",
        is_number=False,
    ),
    Column(
        "backend",
        "backend",
        lambda row: row.run["backend"] or ABSENT,
        "What really ran the exchange: baseline is the collective library, host is shared memory between processes, "
        "cuda and triton are GPU kernels.",
        is_number=False,
    ),
    _figure("ranks", "ranks", 0, "Processes that trained together."),
    _figure("seed", "seed", 0, "Seed of weights and data order."),
    _figure("steps", "steps", 0, "The last step that was logged."),
    _figure("final_loss", "final loss", 5, "Training loss (cross-entropy, in nats) of the last step, over all ranks."),
    _figure(
        "auc", "AUC", 4, "Evaluation: chance that a clicked sample is ranked above one that was not. 0.5 is guessing."
    ),
    _figure(
        "ne",
        "NE",
        4,
        "Normalised entropy: evaluation loss over that of always predicting the mean. Below 1 has learned.",
    ),
    _figure("perplexity", "perplexity", 3, "Evaluation: e to the loss a token. 1 is knowing every next token."),
    _figure("step_ms", "step ms", 2, "Median time of a training step, warm-up left out."),
    _figure("data_ms", "data", 2, "Waiting for the next batch, ms."),
    _figure(
        "index_dist_ms",
        "index dist.",
        2,
        "Waiting for category ids to reach the ranks that own their tables (DLRM), or for replicas to count their tokens, ms.",
    ),
    _figure("compute_ms", "compute", 2, "The rest of the step: lookups, network, backward, optimizer, ms."),
    _figure(
        "exposed_comm_ms",
        "exposed comm.",
        2,
        "Waiting for an exchange while none of the step's compute runs, ms. This is what fusing is meant to remove.",
    ),
    _figure("samples_per_s", "samples/s", 0, "Median throughput over all ranks, warm-up left out."),
    _figure("tokens_per_s", "tokens/s", 0, "Median throughput over all ranks, warm-up left out."),
    Column(
        "mfu",
        "MFU",
        lambda row: ABSENT if row.run["mfu"] is None else f"{row.run['mfu']:.1%}",
        "Model FLOP utilisation: arithmetic the model needs, over what the cards could do in dense bf16.",
    ),
    Column(
        "step_reduction_percent",
        "step time saved",
        _reduction,
        "Reduction of the median step against the baseline run that differs in nothing but communication. Negative is "
        "slower. ~ marks a difference within the spread: the middle halves of both runs' step times overlap.",
    ),
    Column(
        "early_loss_difference",
        "early loss diff.",
        lambda row: small(row.early_loss_difference),
        f"Largest relative difference between the training losses of this run and its baseline over the first "
        f"{EARLY_STEPS} steps. Up to {LOSS_TOLERANCE:.0e} is rounding.",
    ),
)


ONE_FAMILYS = ("auc", "ne", "perplexity", "tokens_per_s", "mfu")


def shown_columns(comparison: Comparison) -> list[Column]:
    """All columns, without `status` where every run is ok, and without figures of a family that none of the runs is of."""
    hidden = {key for key in ONE_FAMILYS if all(row.run[key] is None for row in comparison.rows)}
    if all(row.run.status == "ok" for row in comparison.rows):
        hidden.add("status")
    return [column for column in COLUMNS if column.key not in hidden]


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the figures (as one table where the terminal is wide enough for it, else as two), warnings and notes."""
    columns = [column for column in shown_columns(comparison) if column.key not in ("ranks", "seed", "steps")]
    whole = _table(comparison, columns)
    width = Measurement.get(console, console.options.update(width=10_000), whole).maximum
    if not console.is_terminal:
        console = Console(file=console.file, width=max(width, console.width))
    if width <= console.width:
        console.print(whole)
    else:
        console.print(_table(comparison, [column for column in columns if column.key not in STEP_TIME]))
        console.print(_table(comparison, [column for column in columns if column.key in ("label", *STEP_TIME)]))
    wraps = console.is_terminal
    for warning in comparison.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=not wraps)
    for note in comparison.notes:
        console.print(escape(note), style="dim", highlight=False, soft_wrap=not wraps)


def _table(comparison: Comparison, columns: list[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        heading = column.heading.replace(" ", "\n")
        table.add_column(heading, justify="right" if column.is_number else "left", no_wrap=True, vertical="bottom")
    for row in comparison.rows:
        style = None if row.run.status == "ok" else "red"
        table.add_row(*(escape(column.text(row)) for column in columns), style=style)
    return table


def json_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One object a run, in the order given: the run's own summary, and what it was measured against."""
    return [
        {
            **{key: row.run[key] for key in _LEADING},
            **row.run.summary,
            "name": row.run.name,
            "label": row.label,
            "path": str(row.run.path),
            "status": row.run.status,
            "reason": row.run.reason,
            "baselines": [run.name for run in row.baselines],
            "no_baseline": row.no_baseline,
            "step_reduction_percent": row.step_reduction,
            "exposed_comm_reduction_percent": row.exposed_reduction,
            "within_spread": row.within_spread,
            "loss_difference": row.loss_difference,
            "early_loss_difference": row.early_loss_difference,
        }
        for row in comparison.rows
    ]


_LEADING = (
    *("comm", "backend", "ranks", "seed", "steps", "final_loss", "auc", "ne", "perplexity"),
    *("step_ms", "data_ms", "index_dist_ms", "compute_ms", "exposed_comm_ms", "samples_per_s", "tokens_per_s", "mfu"),
)
