"""A W&B report that sets fused runs against baseline runs, defined in code.

    python -m launch.wandb_report --entity TEAM [--project fusecomm] [--group SWEEP] [--out SPEC.json]
    python -m launch.wandb_report --entity TEAM --save

Building it needs neither a key nor a network; `--save` needs both. Metric names are those of
`trainers.loggers.wandb_logger`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb_workspaces.reports.v2 as wr
from wandb_workspaces import expr

from trainers.config import LoggerConfig
from trainers.loggers.wandb_logger import STEP_METRIC, has_key
from trainers.run_summary import TIMINGS

COMM_KEY = "comm.mode"
PART_TITLES = {
    "step_ms": "Median step, ms",
    "data_ms": "of it: waiting for data, ms",
    "index_dist_ms": "of it: index distribution, ms",
    "compute_ms": "of it: compute, ms",
    "exposed_comm_ms": "of it: exposed communication, ms",
}
COLUMNS = (
    *("status", "summary/step_ms", "summary/exposed_comm_ms", "summary/samples_per_s", "summary/tokens_per_s"),
    *("summary/mfu", "summary/auc", "summary/ne", "summary/perplexity"),
)


def build_report(entity: str, project: str, group: str | None = None) -> wr.Report:
    """The report over the runs of `project`, or of one sweep (`group`) in it. Asks no server."""
    scope = f"Runs of sweep {group}." if group else f"All runs of project {project}."
    return wr.Report(
        entity=entity,
        project=project,
        title="Fused against baseline" + (f": {group}" if group else ""),
        description="Training with collectives fused into the kernels that feed them, against the collective library.",
        width="fluid",
        blocks=[
            wr.H1("The same training?"),
            wr.P(f"{scope} Fusing changes when numbers travel, not what they are: the lines should lie on each other."),
            wr.PanelGrid(runsets=[_runs_by_communication(group)], panels=_quality_panels()),
            wr.H1("What did it buy?"),
            wr.P(
                "Medians over the steps after warm-up. Exposed communication is time in which a step waits for a "
                "collective while none of its compute runs."
            ),
            wr.PanelGrid(runsets=[_runs_by_communication(group)], panels=_time_panels()),
        ],
    )


def spec(report: wr.Report) -> dict[str, Any]:
    """What W&B would store, as plain containers."""
    return report._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the report was built (and saved, where asked), 1 when saving is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.wandb_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entity", required=True, help="the W&B user or team that owns the project")
    parser.add_argument("--project", default=LoggerConfig.project, help="default: %(default)s")
    parser.add_argument("--group", help="only the runs of this sweep")
    parser.add_argument("--out", type=Path, help="write the report's definition as JSON")
    parser.add_argument("--save", action="store_true", help="save it to W&B and print its address")
    arguments = parser.parse_args(argv)
    report = build_report(arguments.entity, arguments.project, arguments.group)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(spec(report), indent=2) + "\n", encoding="utf-8")
        print(f"definition: {arguments.out}")
    if not arguments.save:
        print(f"built {report.title!r} with {len(report.blocks)} blocks; nothing was sent (--save sends it)")
        return 0
    if not has_key():
        print(
            "launch.wandb_report: --save needs a W&B key and none is configured: run `wandb login`, set WANDB_API_KEY",
            file=sys.stderr,
        )
        return 1
    report.save()
    print(f"saved: {report.url}")
    return 0


def _runs_by_communication(group: str | None) -> wr.Runset:
    # A run set without a project takes the report's; with one, building it would ask the server for the project's id.
    return wr.Runset(
        name="runs by communication",
        groupby=[f"config.{COMM_KEY}"],
        filters=expr.And(expr.Metric("Group") == group) if group else "",
        pinned_columns=[f"summary:{column}" for column in COLUMNS],
    )


def _quality_panels() -> list[Any]:
    half = {"w": 12, "h": 9}
    return [
        _line("Training loss", "train/loss", wr.Layout(x=0, y=0, **half)),
        _line("Evaluation AUC", "eval/auc", wr.Layout(x=12, y=0, **half)),
        _line("Evaluation NE", "eval/ne", wr.Layout(x=0, y=9, **half)),
        _bar("AUC at the end", "summary/auc", wr.Layout(x=12, y=9, **half)),
        _line("Evaluation perplexity", "eval/perplexity", wr.Layout(x=0, y=18, **half)),
        _bar("Perplexity at the end", "summary/perplexity", wr.Layout(x=12, y=18, **half)),
    ]


def _time_panels() -> list[Any]:
    panels = [
        _line("Step time, ms", "train/step_ms", wr.Layout(x=0, y=0, w=12, h=9)),
        _line("Exposed communication, ms", "train/exposed_comm_ms", wr.Layout(x=12, y=0, w=12, h=9)),
        _bar("Samples per second", "summary/samples_per_s", wr.Layout(x=0, y=9, w=12, h=7)),
    ]
    panels.append(_bar("Tokens per second", "summary/tokens_per_s", wr.Layout(x=12, y=9, w=12, h=7)))
    places = [(0, 16), (12, 16), (0, 23), (12, 23), (0, 30)]
    for key, (x, y) in zip(TIMINGS, places, strict=True):
        panels.append(_bar(PART_TITLES[key], f"summary/{key}", wr.Layout(x=x, y=y, w=12, h=7)))
    return panels


def _line(title: str, metric: str, layout: wr.Layout) -> wr.LinePlot:
    return wr.LinePlot(
        title=title,
        x=STEP_METRIC,
        y=[metric],
        title_x="step",
        groupby=wr.Config(COMM_KEY),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        layout=layout,
    )


def _bar(title: str, metric: str, layout: wr.Layout) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[metric],
        orientation="v",
        groupby=wr.Config(COMM_KEY),
        groupby_aggfunc="median",
        groupby_rangefunc="minmax",
        layout=layout,
    )


if __name__ == "__main__":
    sys.exit(main())
