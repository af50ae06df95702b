"""Renders the page: one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from launch.page import charts
from launch.page.comparison import EARLY_STEPS, Comparison, Row
from launch.page.table import ABSENT, number, shown_columns, signed_percent, small

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    heading: str
    figure: str
    detail: str
    mood: str = ""  # good | bad | ""


def render(comparison: Comparison, created: str) -> str:
    """The page as text. `created` is shown as its date."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    columns = shown_columns(comparison)
    losses, steps = charts.loss_figure(comparison), charts.step_figure(comparison)
    return environment.get_template("page.html.j2").render(
        created=created,
        verdict=verdict(comparison),
        badges=badges(comparison),
        tiles=tiles(comparison),
        comparison=comparison,
        columns=columns,
        config_text=config_text,
        absent=ABSENT,
        losses=losses and figure_json(losses),
        steps=steps and figure_json(steps),
        thinned=any(len(row.run.train) > charts.MAX_POINTS for row in comparison.rows),
        style=_inline("style.css"),
        script=_inline("page.js"),
        plotly=Markup(get_plotlyjs()),
    )


def verdict(comparison: Comparison) -> str:
    """One sentence that says what fusing did to the median step."""
    pairs = comparison.pairs
    if not pairs:
        return "There is no pair to compare: a fused run and a baseline run that differ in nothing but communication."
    if len(pairs) > 1:
        saved = sorted(_saved(row) for row in pairs)
        longer = " (below zero is longer)" if saved[0] < 0 else ""
        span = f"{saved[0]:.1f} % to {saved[-1]:.1f} %{longer}"
        return f"Over {len(pairs)} pairs, fusing shortened the median step by {span}."
    row = pairs[0]
    before = row.run["step_ms"] / (1 - _saved(row) / 100)
    direction = "shorter" if _saved(row) >= 0 else "longer"
    doubt = " The spread of single steps is wider than this difference." if row.within_spread else ""
    return (
        f"The median training step is {abs(_saved(row)):.1f} % {direction} with {row.label}: "
        f"{number(row.run['step_ms'], 2)} ms against {number(before, 2)} ms.{doubt}"
    )


def tiles(comparison: Comparison) -> list[Tile]:
    """Headline figures: of the pair, or medians over all pairs."""
    pairs = comparison.pairs
    if not pairs:
        return []
    doubtful = all(row.within_spread for row in pairs)
    step = statistics.median(_saved(row) for row in pairs)
    exposed = [row.exposed_reduction for row in pairs if row.exposed_reduction is not None]
    saved = statistics.median(exposed) if exposed else None
    early = [row.early_loss_difference for row in pairs if row.early_loss_difference is not None]
    over = "of a median step" if len(pairs) == 1 else f"median over {len(pairs)} pairs"
    found = [
        Tile("step time saved", signed_percent(step), over, "" if doubtful else _mood(step)),
        Tile("exposed comm. saved", signed_percent(saved), over, _mood(saved)),
    ]
    if len(pairs) == 1:
        run, baseline = pairs[0].run, pairs[0].baselines[0]
        is_text = run["perplexity"] is not None
        speed = ("tokens per second", "tokens_per_s", 0) if is_text else ("samples per second", "samples_per_s", 0)
        for heading, key, digits in (speed, ("perplexity", "perplexity", 3) if is_text else ("AUC", "auc", 4)):
            found.append(Tile(heading, number(run[key], digits), f"baseline {number(baseline[key], digits)}"))
    if early:
        found.append(Tile("early loss difference", small(max(early)), f"relative, first {EARLY_STEPS} steps"))
    return found


def badges(comparison: Comparison) -> list[str]:
    """What the runs have in common, in a few words each."""
    runs = [row.run for row in comparison.rows if row.run.summary]
    ranks = _shared(runs, "ranks")
    found = [
        _shared(runs, "model"),
        _shared(runs, "device"),
        ranks and f"{ranks} rank{'s' if ranks != '1' else ''}",
        "synthetic data" if any(run["data_is_synthetic"] for run in runs) else _shared(runs, "data"),
    ]
    found += sorted({run["link"] for run in runs if run["link"]})
    return [badge for badge in dict.fromkeys(found) if badge]


def figure_json(figure: go.Figure) -> Markup:
    """A figure as JSON that is safe inside a <script> element."""
    text = json.dumps(json.loads(figure.to_json()))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def config_text(value: Any) -> str:
    return ABSENT if value is None else json.dumps(value) if isinstance(value, (list, dict, bool)) else str(value)


def _shared(runs: list[Any], key: str) -> str:
    values = {run[key] for run in runs if run[key] is not None}
    return str(values.pop()) if len(values) == 1 else ""


def _saved(row: Row) -> float:
    assert row.step_reduction is not None
    return row.step_reduction


def _mood(percent: float | None) -> str:
    return "" if percent is None else "good" if percent > 0 else "bad" if percent < 0 else ""


def _inline(name: str) -> Markup:
    return Markup((HERE / name).read_text(encoding="utf-8"))
