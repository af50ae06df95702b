"""A Transformer trains alike however it is split: losses against one process, over some hundred steps on real text.

    python -m tests.parity.transformer --steps 200 --ranks 2 4 --out FILE

Losses of every run are compared with those of one process. Rounding grows over steps by itself, so a control that only
permutes the samples of each batch says how far runs may be apart; a run may drift three times as far.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from tests.ranks import run_ranks
from tests.trainers import tiny
from trainers.checkpoint import Progress
from trainers.config import RunConfig, typed
from trainers.data.text.batch import TextBatch
from trainers.families import make_engine
from trainers.transformer.batches import build_batches

MODEL = Path(__file__).parents[2] / "configs" / "model" / "transformer_tiny.yaml"
STRICT_STEPS = 20
STRICT_RELATIVE = 2e-5
TIMES_THE_CONTROL = 3
OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")
RUNS: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        ("TP", "baseline", {}),
        ("TP", "fused", {}),
        ("TP, sequence parallel", "baseline", {"sequence_parallel": True}),
        ("TP, sequence parallel", "fused", {"sequence_parallel": True}),
        ("DDP", "fused", {"tensor_parallel": 1}),
        ("DeepSpeed ZeRO 1", "fused", {"tensor_parallel": 1, "kind": "deepspeed"}),
        ("DeepSpeed ZeRO 2", "fused", {"tensor_parallel": 1, "kind": "deepspeed", "zero_stage": 2}),
    ],
    4: [
        ("TP", "baseline", {}),
        ("TP", "fused", {}),
        ("TP, sequence parallel", "fused", {"sequence_parallel": True}),
        ("DDP x TP = 2 x 2", "fused", {"tensor_parallel": 2}),
        ("ZeRO 1 x TP = 2 x 2", "fused", {"tensor_parallel": 2, "kind": "deepspeed"}),
    ],
}


def configure(steps: int, comm: str = "baseline", engine: dict[str, Any] | None = None) -> RunConfig:
    model = OmegaConf.load(MODEL)
    del model["defaults"]
    recipe = model.recipe
    optim = {
        "name": recipe.optimizer,
        **{
            key: recipe[key]
            for key in ("lr", "eps", "betas", "weight_decay", "clip_norm", "warmup_steps", "decay", "min_lr")
        },
    }
    return typed(
        {
            "comm": {
                "mode": comm,
                **dict.fromkeys((*OPERATORS, "embedding_all_to_all"), comm),
                "timeout_s": 120.0,
                "require_fused": comm == "fused",
            },
            "model": {"family": "transformer", **OmegaConf.to_container(model)},  # type: ignore[dict-item]
            "data": {"kind": "text", "batch_size": recipe.batch_size, "length": model.max_length},
            "optim": optim,
            "engine": engine or {},
            "trainer": {"steps": steps, "warmup": 2, "progress": False, "eval_batches": 16},
            "run_dir": tempfile.mkdtemp(prefix="parity"),
        }
    )


def train(config: RunConfig, permutation_seed: int | None = None) -> tuple[list[float], float]:
    """On every rank of a group: losses, and the perplexity of 16 validation batches; with a seed, the samples of every batch
    are permuted first."""
    engine = make_engine(config)
    generator = torch.Generator().manual_seed(permutation_seed or 0)

    def batches(data: Any, model: Any, split: str, rank: int, world: int, start: int) -> Iterator[TextBatch]:
        for batch in build_batches(data, model, split, engine.replica.rank, engine.replica.count, start):
            if permutation_seed is not None:
                order = torch.randperm(len(batch), generator=generator)
                batch = TextBatch(
                    batch.tokens[order], batch.targets[order], batch.positions[order], batch.documents[order]
                )
            yield batch

    records = tiny.run_loop(config, engine, Progress(), batches)
    engine.close()
    return tiny.losses(records), records[-1]["perplexity"]


def _drift(losses: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]


def compare(steps: int, ranks: list[int]) -> list[dict[str, Any]]:
    limit = 120 + 4 * steps
    reference, perplexity = run_ranks(1, train, configure(steps), timeout=limit)[0]
    first_loss, last_loss = reference[0], sum(reference[-10:]) / len(reference[-10:])
    rows: list[dict[str, Any]] = [
        {"run": "one process", "ranks": 1, "steps": steps, "perplexity": perplexity, "first_loss": first_loss}
        | {"last_10_losses": last_loss, "first_20": 0.0, "all": 0.0, "ok": last_loss < 0.8 * first_loss}
    ]
    controls = [_drift(run_ranks(1, train, configure(steps), seed, timeout=limit)[0][0], reference) for seed in (1, 2)]
    allowed = TIMES_THE_CONTROL * max(max(control) for control in controls)
    first = max(max(control[:STRICT_STEPS]) for control in controls)
    rows.append(
        {"run": "one process, samples permuted (control)", "ranks": 1, "steps": steps, "first_20": first}
        | {"all": allowed / TIMES_THE_CONTROL, "ok": True}
    )
    for world in ranks:
        for name, comm, engine in RUNS[world]:
            losses, found = run_ranks(world, train, configure(steps, comm, engine), timeout=limit)[0]
            drift = _drift(losses, reference)
            first, worst = max(drift[:STRICT_STEPS]), max(drift)
            ok = first <= STRICT_RELATIVE and worst <= allowed
            facts = {"run": f"{name}, {comm}", "ranks": world, "steps": steps, "perplexity": found}
            rows.append(facts | {"first_20": first, "all": worst, "ok": ok})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.parity.transformer", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = compare(options.steps, options.ranks)
    for row in rows:
        perplexity = f"perplexity {row['perplexity']:.4f}" if "perplexity" in row else ""
        print(
            f"{'ok  ' if row['ok'] else 'FAIL'} {row['run']:42} {row['ranks']} ranks  relative loss difference to one process: "
            f"{row['first_20']:.1e} in {STRICT_STEPS} steps, {row['all']:.1e} in {row['steps']}  {perplexity}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
