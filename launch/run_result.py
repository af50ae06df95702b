"""A finished run in one line, for whoever watches the terminal; `summary.json` has all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIGURES = (
    ("final_loss", "loss {:.4f}"),
    ("auc", "AUC {:.4f}"),
    ("ne", "NE {:.4f}"),
    ("perplexity", "perplexity {:.3f}"),
    ("step_ms", "{:.2f} ms a step"),
    ("exposed_comm_ms", "{:.2f} ms of it exposed communication"),
    ("samples_per_s", "{:,.0f} samples/s"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("mfu", "MFU {:.1%}"),
    ("backend", "backend {}"),
)


def in_one_line(summary: Mapping[str, Any]) -> str:
    """`trained to step 300: loss 0.4166, ...`; figures that `summary` lacks, or holds as null, are left out."""
    known = [text.format(summary[key]) for key, text in FIGURES if summary.get(key) is not None]
    warnings = [f"\nwarning: {warning}" for warning in summary.get("warnings", ())]
    return f"trained to step {summary.get('steps', 0)}: {', '.join(known) or 'no figures'}{''.join(warnings)}"
