"""What a run of `launch.generate` found, for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.transformer.generation import Generated
from models.transformer.step_split import StepSplit
from trainers.loggers import strict_json

FIRST_STEPS = 2  # left out of the figures: caches are cold


def figures(generated: Generated, split: StepSplit | None) -> dict[str, Any]:
    """Times of rank 0. tokens_per_s: new tokens of all sequences in the time from the prompts to the last of them.

    token_ms_*: time per token of a sequence, which is a step's; the first steps left out where others are left.
    """
    steps = generated.step_ms[FIRST_STEPS:] or generated.step_ms
    new = sum(map(len, generated.tokens))
    found: dict[str, Any] = {
        "new_tokens": new,
        "tokens_per_s": 1e3 * new / (generated.prefill_ms + sum(generated.step_ms)),
        "prefill_ms": generated.prefill_ms,
        "token_ms_median": statistics.median(steps) if steps else None,
        "token_ms_p90": _p90(steps),
        "step_ms": generated.step_ms,
        "cuda_graph": generated.cuda_graph,
        "split": None,
    }
    if split is not None:
        found["split"] = asdict(split)
    return found


def _p90(values: list[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=10, method="inclusive")[8]


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The texts, then the figures."""
    for number, text in enumerate(report["texts"] or ()):
        yield f"[{number}] {_printable(text['prompt'] + text['continuation'])}"
    yield f"{report['tokens_per_s']:,.1f} tokens/s: {report['new_tokens']} new tokens for {report['batch']} sequences"
    if report["token_ms_median"] is not None:
        graph = ", one CUDA graph a step" if report["cuda_graph"] else ""
        yield (
            f"{report['token_ms_median']:.3f} ms a token (median; p90 {report['token_ms_p90']:.3f}), "
            f"prompts {report['prefill_ms']:.1f} ms{graph}"
        )
    split = report["split"]
    if split is not None:
        parts = (("GEMV", "gemv_ms"), ("communication", "communication_ms"), ("rest", "rest_ms"))
        shares = ", ".join(f"{name} {split[key]:.3f} ms ({split[key] / split['step_ms']:.0%})" for name, key in parts)
        yield f"{split['step_ms']:.3f} ms a step of {split['steps']} more: {shares}"
    if report["backend"] is None:
        yield "1 rank, so nothing is communicated"
    else:
        yield f"{report['ranks']} ranks, comm={report['comm']}, backend {report['backend']}, link: {report['link']}"


def _printable(text: str) -> str:
    """Without what would move a terminal's cursor: a model may say anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def write(path: str | Path, report: Mapping[str, Any]) -> None:
    """The whole report or none of it."""
    partial = Path(f"{path}.tmp")
    partial.write_text(strict_json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
