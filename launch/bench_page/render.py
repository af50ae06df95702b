"""Shows sections as HTML or Markdown."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from launch.bench_page.results import Cell, Section, Table

HERE = Path(__file__).parent
STYLE = HERE.parent / "page" / "style.css"
TEMPLATES = {".html": "page.html.j2", ".md": "page.md.j2"}
ABSENT = "-"


@dataclass(frozen=True)
class Dot:
    """A ratio in a chart, by its place in percent of the width."""

    at: float
    text: str


def render(sections: Sequence[Section], sources: Sequence[Path], out: Path) -> str:
    """The page as text; `sources` are named in it relative to `out`."""
    html = out.suffix == ".html"
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(TEMPLATES[out.suffix]).render(
        sections=sections,
        sources=[os.path.relpath(source, out.parent) for source in sources],
        ms=ms,
        ratio=ratio,
        summary=summary,
        chart=chart,
        style=Markup(STYLE.read_text(encoding="utf-8")),
    )


def ms(value: Cell | float | None) -> str:
    """Three significant digits, in milliseconds; with its marks."""
    if value is None:
        return ABSENT
    number, mark = (value.ms, value.mark) if isinstance(value, Cell) else (value, "")
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 3
    return f"{number:.{min(digits, 4)}f}{mark}"


def ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def summary(table: Table) -> list[str]:
    """`fused / unfused: median 0.83 (0.58 to 0.97)` for each ratio."""
    found = [(heading, table.spread(heading)) for heading in table.ratio_headings]
    return [f"{heading}: median {s[1]:.2f} ({s[0]:.2f} to {s[2]:.2f})" for heading, s in found if s is not None]


def chart(table: Table) -> dict[str, object]:
    """For each line the places of its ratios on one scale from 0 that holds 1 and the largest of all."""
    known = [r for line in table.lines for r in line.ratios if r is not None]
    largest = max([1.0, *known]) * 1.05
    lines = [
        (line.name, [None if r is None else Dot(100 * r / largest, ratio(r)) for r in line.ratios])
        for line in table.lines
    ]
    step = 0.25 if largest <= 2 else 0.5 if largest <= 4 else math.ceil(largest / 8)
    ticks = [Dot(100 * n * step / largest, f"{n * step:g}") for n in range(int(largest / step) + 1)]
    return {"lines": lines if known else [], "ticks": ticks, "one": 100 / largest}
