"""Do `comm=fused`, `comm=baseline` and a plain one-process DLRM train alike? A record of losses and AUC.

    python -m tests.parity.dlrm --steps 300 --ranks 2 4 --out docs/results/cpu/parity.json

The plain model (nn.EmbeddingBag, nn.Linear, torch's Adagrad, one process) sees the same global batches. Rounding makes any
two runs that sum in different orders drift apart, so the yardstick is the plain model against itself with the samples of
every batch permuted, which changes nothing but the order of summation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.models.dlrm.plain import PlainDLRM
from tests.ranks import run_ranks
from tests.trainers import tiny
from trainers.checkpoint import Progress
from trainers.config import RunConfig, typed
from trainers.data.batch import Batch
from trainers.dlrm import metrics
from trainers.dlrm.batches import build_batches, data_info
from trainers.families import make_engine

CONFIGS = Path(__file__).parents[2] / "configs"
STRICT_STEPS = 20
STRICT_RELATIVE = 1e-5
AUC_TOLERANCE = 0.002
CONTROLS = 3


def configure(comm: str, steps: int, samples: int, lr: float) -> RunConfig:
    model = OmegaConf.load(CONFIGS / "model" / "dlrm_tiny.yaml")
    del model["defaults"]
    model.family = "dlrm"
    values = {
        "comm": {
            "mode": comm,
            "embedding_all_to_all": comm,
            "timeout_s": 120.0,
            "require_fused": comm == "fused",
        },
        "model": model,
        "data": {"kind": "synthetic", "batch_size": 2048, "num_samples": samples},
        "optim": {"name": "adagrad", "lr": lr, "eps": 1e-8},
        "trainer": {"steps": steps, "warmup": 2, "progress": False},
        "run_dir": tempfile.mkdtemp(prefix="parity"),
    }
    return typed(values)


def train_sharded(config: RunConfig) -> tuple[list[float], float]:
    """On every rank of a group: losses, and AUC over the whole validation split (rank 0's)."""
    engine = make_engine(config)
    records = tiny.run_loop(config, engine, Progress(), build_batches)
    engine.close()
    auc = [r["auc"] for r in records if r["event"] == "eval"]
    return tiny.losses(records), auc[-1] if auc else float("nan")


def train_plain(config: RunConfig, permutation_seed: int | None = None) -> tuple[list[float], float]:
    """The same on one process in plain torch; with a seed, the samples of every batch are permuted first."""
    model, optim = PlainDLRM(config), config.optim
    optimizer = torch.optim.Adagrad(model.parameters(), lr=optim.lr, eps=optim.eps)
    generator = torch.Generator().manual_seed(permutation_seed or 0)
    losses = []
    batches = iter(build_batches(config.data, config.model, "train", 0, 1, 0))
    for _, batch in zip(range(config.trainer.steps), batches, strict=False):
        if permutation_seed is not None:
            batch = _permuted(batch, torch.randperm(len(batch.labels), generator=generator))
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch), batch.labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        val = list(build_batches(config.data, config.model, "val", 0, 1, 0))
        logits = torch.cat([model(batch) for batch in val])
        labels = torch.cat([batch.labels.float() for batch in val])
    return losses, metrics.evaluate(logits, labels).auc


def _permuted(batch: Batch, order: torch.Tensor) -> Batch:
    """One id a bag, so that permuting samples is indexing."""
    keys = batch.sparse.keys()
    values = torch.cat([batch.sparse[key].values()[order] for key in keys])
    sparse = KeyedJaggedTensor(keys=keys, values=values, lengths=batch.sparse.lengths())
    return Batch(batch.dense[order], sparse, batch.labels[order])


def _drift(losses: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]


def compare(steps: int, ranks: list[int], samples: int, lr: float) -> list[dict[str, Any]]:
    config = configure("baseline", steps, samples, lr)
    info = data_info(config.data, config.model)
    reference, reference_auc = train_plain(config)
    controls = [_drift(train_plain(config, seed)[0], reference) for seed in range(1, CONTROLS + 1)]
    allowed = max(max(control) for control in controls)
    facts = {"steps": steps, "data": "synthetic", "bayes_auc": info.bayes_auc, "plain_auc": reference_auc}
    control_first = max(max(c[:STRICT_STEPS]) for c in controls)
    rows = [
        {"run": "plain permuted (control)", "ranks": 1, **facts, "first_20": control_first, "all": allowed, "ok": True}
    ]
    for world in ranks:
        for comm in ("baseline", "fused"):
            results = run_ranks(world, train_sharded, configure(comm, steps, samples, lr), timeout=60 + 3 * steps)
            losses, auc = results[0]
            drift = _drift(losses, reference)
            first, worst = max(drift[:STRICT_STEPS]), max(drift)
            ok = first <= STRICT_RELATIVE and worst <= allowed and abs(auc - reference_auc) <= AUC_TOLERANCE
            rows.append({"run": comm, "ranks": world, **facts, "auc": auc, "first_20": first, "all": worst, "ok": ok})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.parity.dlrm", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--samples", type=int, default=800_000)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = compare(options.steps, options.ranks, options.samples, options.lr)
    for row in rows:
        auc = f"AUC {row['auc']:.5f}" if "auc" in row else ""
        print(
            f"{'ok  ' if row['ok'] else 'FAIL'} {row['run']:26} {row['ranks']} ranks  relative loss difference to plain: "
            f"{row['first_20']:.1e} in {STRICT_STEPS} steps, {row['all']:.1e} in {row['steps']}  {auc}"
        )
    print(f"plain AUC {rows[0]['plain_auc']:.5f}, Bayes AUC {rows[0]['bayes_auc']:.5f} (synthetic data)")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
