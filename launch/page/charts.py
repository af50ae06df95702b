"""The page's two charts as plotly figures. Colours of text, grid and background belong to the page, which knows its
theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from launch.page.comparison import Comparison, Row

MAX_POINTS = 2000
FUSED_COLOUR = "#f2762e"
BASELINE_COLOUR = "#5b8def"
GROUP_COLOURS = ("#5b8def", "#3aa981", "#b279e0", "#e0a030", "#e0607e", "#3fa7c4", "#9a8f5c", "#8a93a6")
PARTS = {
    "data_ms": ("data", "#9aa4b2"),
    "index_dist_ms": ("index distribution", "#3fa7c4"),
    "compute_ms": ("compute", "#4c6fb3"),
    "exposed_comm_ms": ("exposed communication", "#e5484d"),
}


def loss_figure(comparison: Comparison) -> go.Figure | None:
    """Training losses, baselines as wide bands beneath and fused runs as thin lines on top; below, how far apart they
    are.

    None where no run logged a step.
    """
    rows = [row for row in comparison.rows if row.run.train]
    if not rows:
        return None
    apart = [row for row in rows if any(difference > 0 for _, difference in row.loss_differences)]
    figure = make_subplots(
        rows=2 if apart else 1,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.72, 0.28] if apart else None,
        vertical_spacing=0.09,
    )
    for row in sorted(rows, key=lambda row: not row.is_baseline):
        points = thin([(event["step"], event["loss"]) for event in row.run.train])
        figure.add_trace(_line(row, points, _colour(comparison, row)), row=1, col=1)
    for row in apart:
        points = thin([(step, difference) for step, difference in row.loss_differences if difference > 0])
        line = {"width": 1.3, "color": _colour(comparison, row)}
        trace = go.Scatter(
            x=[step for step, _ in points],
            y=[difference for _, difference in points],
            name=row.label,
            showlegend=False,
            line=line,
            hovertemplate="step %{x}<br>%{y:.2e} apart<extra></extra>",
        )
        figure.add_trace(trace, row=2, col=1)
    figure.update_yaxes(title_text="training loss", row=1, col=1)
    figure.update_xaxes(title_text="step", row=2 if apart else 1, col=1)
    if apart:
        figure.update_yaxes(title_text="relative diff.", type="log", exponentformat="power", nticks=5, row=2, col=1)
    return _finish(figure, height=500 if apart else 390)


def step_figure(comparison: Comparison) -> go.Figure | None:
    """One bar a run: the medians of a step's four parts stacked; beside it the median step and its quartiles."""
    rows = [row for row in comparison.rows if _known(row.run["step_ms"])][::-1]  # plotly fills upwards
    if not rows:
        return None
    labels = [row.label for row in rows]
    figure = go.Figure()
    for key, (name, colour) in PARTS.items():
        values = [row.run[key] if _known(row.run[key]) else None for row in rows]
        figure.add_bar(
            y=labels,
            x=values,
            name=name,
            orientation="h",
            marker_color=colour,
            text=[f"{value:.1f}" if value is not None else "" for value in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "#ffffff", "size": 12},
            hovertemplate=f"{name}: %{{x:.2f}} ms<extra>%{{y}}</extra>",
        )
    ends = [sum(row.run[key] or 0 for key in PARTS) for row in rows]
    figure.add_scatter(
        y=labels,
        x=ends,
        mode="text",
        text=[f"  <b>{row.run['step_ms']:.2f} ms</b>{_middle_half(row)}" for row in rows],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    figure.update_layout(
        barmode="stack", bargap=0.35, legend_traceorder="normal", uniformtext={"minsize": 9, "mode": "hide"}
    )
    figure.update_xaxes(title_text="milliseconds a step", range=[0, 1.3 * max(ends)])
    figure.update_yaxes(showgrid=False)
    return _finish(figure, height=150 + 62 * len(rows))


def thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about MAX_POINTS of `points`, evenly spaced, the last one kept. Non-finite values become gaps."""
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return [(step, value if _known(value) else math.nan) for step, value in kept]


def _line(row: Row, points: list[tuple[int, float]], colour: str) -> go.Scatter:
    style = {"width": 7 if row.is_baseline else 1.8, "dash": "solid" if row.run.status == "ok" else "dot"}
    return go.Scatter(
        x=[step for step, _ in points],
        y=[None if math.isnan(loss) else loss for _, loss in points],
        name=row.label if row.run.status == "ok" else f"{row.label} ({row.run.status})",
        mode="lines",
        line={"color": colour, **style},
        opacity=0.55 if row.is_baseline else 1.0,
        hovertemplate="%{y:.6f}",
    )


def _colour(comparison: Comparison, row: Row) -> str:
    """By communication where the runs differ in nothing else, else by group (the width tells baseline from fused)."""
    if comparison.num_groups <= 1:
        return BASELINE_COLOUR if row.is_baseline else FUSED_COLOUR
    return GROUP_COLOURS[row.group % len(GROUP_COLOURS)]


def _middle_half(row: Row) -> str:
    low, high = row.run["step_ms_p25"], row.run["step_ms_p75"]
    return f" ({low:.2f} to {high:.2f})" if _known(low) and _known(high) else ""


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _finish(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified" if not figure.layout.barmode else "closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        font={"family": "inherit", "size": 13},
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure
