"""Sharded checkpoints: `<run_dir>/checkpoints/step_<n>/`, whole or not there.

    step_<n>/
      *.distcp, .metadata   weights and optimizer states (`torch.distributed.checkpoint`)
      rng_rank<r>.pt        random number generators of every rank
      meta.json             step, data position, ranks, architecture, learning rates, W&B id

A checkpoint is written as `step_<n>.tmp` and renamed when every rank is done. It loads at any number of ranks and
under either `comm`. At the number of ranks that wrote it, training goes on to the bit; at another, tables are resharded
and the generators are seeded anew. Where a run goes back to an earlier step, the later checkpoints of its directory
become `step_<n>.abandoned`, which nothing counts, chooses or removes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

import fused_ops
from trainers.config import RunConfig
from trainers.engine import Engine
from trainers.optimizer_states import regroup

DIRECTORY = "checkpoints"
FORMAT = 1
NAME = re.compile(r"step_(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that isn't there, isn't whole, isn't of this model, or could not be written."""


@dataclass
class Progress:
    """Where training stands: optimizer steps done, batches that every rank has taken, W&B's id of the run."""

    step: int = 0
    batches: int = 0
    wandb_id: str | None = None


def find(resume: str, run_dir: str | Path) -> Path | None:
    """The checkpoint `trainer.resume` means: that one, a run directory's newest, or ("auto") this run's newest.

    None where "auto" finds none. CheckpointError where a path holds no complete checkpoint.
    """
    if resume == "auto":
        return newest(Path(run_dir))
    path = Path(resume)
    if (path / "meta.json").is_file() and not path.name.endswith(".tmp"):
        return path
    found = newest(path)
    if found is None:
        raise CheckpointError(
            f"trainer.resume={resume}: no complete checkpoint there (a checkpoint or a run directory)"
        )
    return found


def newest(run_dir: Path) -> Path | None:
    complete = _complete(run_dir / DIRECTORY)
    return complete[-1] if complete else None


def _complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if NAME.fullmatch(p.name) and (p / "meta.json").is_file()]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def set_aside(run_dir: str | Path, resumed: Path | None) -> list[Path]:
    """Rename this run directory's checkpoints that training does not go on from, so that none passes for its newest.

    `resumed`: the checkpoint that training starts from; None for a start at step 0. What lies in the directory up to that
    checkpoint stays. Returns the new paths. One rank calls it.
    """
    complete = _complete(Path(run_dir).resolve() / DIRECTORY)
    start = None if resumed is None else resumed.resolve()
    past = complete[: complete.index(start) + 1] if start in complete else []
    renamed = []
    for path in complete[len(past) :]:
        aside, number = path.with_name(f"{path.name}.abandoned"), 0
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.abandoned-{number}")
        renamed.append(path.rename(aside))
    return renamed


def save(config: RunConfig, engine: Engine, progress: Progress) -> Path:
    """Write this step's checkpoint and drop all but the newest `trainer.keep_checkpoints`. Every rank calls it.

    Raises what a fused operator recorded before anything is written, so that no garbage is kept. CheckpointError where a
    rank cannot write; older checkpoints are still there then.
    """
    fused_ops.check_errors()
    directory = Path(config.run_dir) / DIRECTORY
    final = directory / f"step_{progress.step}"
    partial = final.with_name(final.name + ".tmp")
    rank = dist.get_rank()
    if rank == 0:
        clean(config.run_dir)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        with _quiet(), _one_error(f"{final} could not be written", directory):
            dcp.save(engine.model_state() | engine.optimizer_state(), checkpoint_id=partial, no_dist=False)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk has room for the summary again
        raise
    torch.save(_generators(), partial / f"rng_rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        meta = {
            "format": FORMAT,
            **asdict(progress),
            "ranks": dist.get_world_size(),
            "comm": config.comm.mode,
            "seed": config.trainer.seed,
            "architecture": engine.describe(),
            "data": _data(config),
            "optim": asdict(config.optim),
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        _publish(partial, final)
        for old in _complete(directory)[: -config.trainer.keep_checkpoints]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(config: RunConfig, engine: Engine, path: Path) -> tuple[Progress, list[str]]:
    """Fill `engine` and the generators from `path`; returns where training stood, and what the user should know.

    CheckpointError lists the keys in which the checkpoint's architecture differs. Every rank calls it.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}/meta.json is damaged: {error}") from error
    if meta["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {meta['format']}; this version reads {FORMAT}")
    differing = _differences(meta["architecture"], engine.describe())
    if differing:
        raise CheckpointError(f"{path} is of another model (saved -> this run): {'; '.join(differing)}")
    with _quiet(), _one_error(f"{path} could not be read"):
        _load_state(path, engine)
    engine.loaded()
    notes = []
    world, rank = dist.get_world_size(), dist.get_rank()
    if meta["ranks"] == world:
        _set_generators(torch.load(path / f"rng_rank{rank}.pt", weights_only=True))
    else:
        seed_generators(config.trainer.seed, rank, meta["step"])
        notes.append(f"checkpoint of {meta['ranks']} ranks loaded on {world}: random generators are seeded anew")
    if changed := _differences(meta["data"], _data(config)):
        notes.append(f"the data position may mean other samples now: {'; '.join(changed)}")
    return Progress(meta["step"], meta["batches"], meta["wandb_id"]), notes


def clean(run_dir: str | Path) -> None:
    """Remove what killed jobs left half written."""
    for leftover in (Path(run_dir) / DIRECTORY).glob("step_*.tmp"):
        shutil.rmtree(leftover)


def seed_generators(seed: int, rank: int, step: int = 0) -> None:
    """Give each rank generators of its own."""
    mixed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _load_state(path: Path, engine: Engine) -> None:
    weights, states = engine.model_state(), engine.optimizer_state()
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = weights | states
    if missing := sorted(wanted.keys() - saved.keys()):
        raise CheckpointError(f"{path} lacks {', '.join(missing[:5])}" + (", ..." if len(missing) > 5 else ""))
    # Row-wise states of a table that is cut into another number of column slices have another shape.
    regrouped = {
        key: torch.empty(saved[key].size)  # type: ignore[union-attr]
        for key, value in states.items()
        if isinstance(value, ShardedTensor) and saved[key].size != value.size()  # type: ignore[union-attr]
    }
    dcp.load(wanted | regrouped, checkpoint_id=path)
    for key, whole in regrouped.items():
        rows, state = weights[key.split("|")[0]].size(0), states[key]
        values = regroup(whole, rows, state.size(0) // rows)
        for shard in state.local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(values[start : start + shard.tensor.numel()])


def _publish(partial: Path, final: Path) -> None:
    for file in partial.iterdir():
        _sync(file)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _data(config: RunConfig) -> dict[str, Any]:
    """What decides which samples a batch holds."""
    return {
        f"data.{key}": value for key, value in asdict(config.data).items() if key not in ("path", "eval_batch_size")
    }


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    keys = sorted(saved.keys() | current.keys())
    return [f"{key}: {saved.get(key)} -> {current.get(key)}" for key in keys if saved.get(key) != current.get(key)]


def _generators() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state.get("cuda") is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


@contextmanager
def _one_error(what: str, target: Path | None = None) -> Iterator[None]:
    """torch's CheckpointException, no Exception and without a reason on its first line, as a CheckpointError with all."""
    try:
        yield
    except CheckpointException as error:
        reasons = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
        if target is not None:  # torch's words for a full disk do not say so
            reasons.append(f"{shutil.disk_usage(target).free / 1e6:,.0f} MB are free there")
        raise CheckpointError(f"{what}: {'; '.join(reasons)}") from error


def _quiet() -> warnings.catch_warnings:
    """ShardedTensor is what TorchRec's sharded modules hold, whatever torch would rather have."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)
