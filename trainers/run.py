"""One rank of one training run, from process group to summary."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fused_ops
from trainers import checkpoint, device, families
from trainers.checkpoint import Progress
from trainers.config import RunConfig
from trainers.data.info import DataInfo
from trainers.engine import Engine
from trainers.failures import GRACE_S, TerminatedError, first_failure, introduce
from trainers.families import make_engine
from trainers.loggers import Loggers, make_loggers
from trainers.loop import Run, train
from trainers.run_summary import (
    FILE_NAME,
    RunFacts,
    StepStatistics,
    backend_that_ran,
    counter_rows,
    with_earlier_figures,
    write_summary,
)

SUMMARY_WRITTEN = "summary_written"


def run(
    config: RunConfig, rank: int, world: int, build_batches: Callable[..., Iterable[Any]] | None = None
) -> dict[str, Any]:
    """Train as `config` says; returns the summary, which rank 0 has also written to `<run_dir>/summary.json`.

    Needs the environment that torchrun sets (MASTER_ADDR, MASTER_PORT) and a run directory that all ranks share.
    `build_batches` replaces `trainers.data`'s. On a failure the exception goes on with a note that names the rank which
    failed first, the summary says `status: failed`, and the process should exit at once: its exit is what frees ranks
    that wait for it.
    """
    device.take(config.trainer)
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    began = time.time()
    statistics = StepStatistics(config.trainer.warmup)
    facts = _facts(config, world)
    store = _join(config, rank, world)
    try:
        if build_batches is None:
            build_batches, info = _data(config)
            facts.data, facts.data_is_synthetic, facts.bayes_auc = info.name, info.synthetic, info.bayes_auc
        with _sigterm_raises(), _quiet(), make_loggers(config.logger, config.run_dir, rank) as loggers:
            _train(config, build_batches, loggers, statistics, facts)
            summary = statistics.summary(facts, "ok")
            if not statistics.steps:
                summary = with_earlier_figures(config.run_dir, summary)
            if rank == 0:
                write_summary(config.run_dir, summary)
            loggers.finish("ok", summary=summary)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = first_failure(store, rank, world, error)
        error.add_note(f"training ended because of {reason}")
        print(f"rank {rank} of {world}: training ended because of {reason}", file=sys.stderr, flush=True)
        _write_failed(config, rank, store, statistics.summary(facts, "failed", reason), began)
        raise
    dist.barrier()
    dist.destroy_process_group()
    return summary


def _train(
    config: RunConfig,
    build_batches: Callable[..., Iterable[Any]],
    loggers: Loggers,
    statistics: StepStatistics,
    facts: RunFacts,
) -> None:
    rank = dist.get_rank()
    checkpoint.seed_generators(config.trainer.seed, rank)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    engine = make_engine(config)
    checkpoint.seed_generators(config.trainer.seed, rank)
    progress, notes = _resume(config, engine)
    if rank == 0:
        for note in notes:
            print(note, file=sys.stderr, flush=True)
    loggers.start(asdict(config), run_id=progress.wandb_id)
    progress.wandb_id = facts.wandb_id = loggers.run_id

    def log(record: dict[str, Any]) -> None:
        statistics.add(record)
        if rank == 0 and (record["event"] != "train" or record["step"] % config.logger.every == 0):
            loggers.log(record)

    def batches(split: str, start: int) -> Iterator[Any]:
        return iter(build_batches(config.data, config.model, split, engine.replica.rank, engine.replica.count, start))

    fused_ops.reset_counters()
    try:
        train(Run(config, engine, batches, log, progress))
    finally:
        _what_ran(config, facts)
    dist.barrier()
    engine.close()


def _resume(config: RunConfig, engine: Engine) -> tuple[Progress, list[str]]:
    """Where training starts, and what the user should know of it. Leaves this run directory's checkpoints in order."""
    progress, path = Progress(), None
    notes: list[str] = []
    if config.trainer.resume is not None:
        path = checkpoint.find(config.trainer.resume, config.run_dir)
    dist.barrier()  # every rank has found the same one
    if path is not None:
        progress, notes = checkpoint.load(config, engine, path)
        notes.insert(0, f"resumed from {path} at step {progress.step}")
    left = config.trainer.steps - progress.step
    if dist.get_rank() == 0:
        checkpoint.clean(config.run_dir)
        if left > 0 and (abandoned := checkpoint.set_aside(config.run_dir, path)):
            names = ", ".join(aside.name for aside in abandoned)
            notes.append(f"set aside, since training does not go on from them: {names}")
    if left <= 0:
        notes.append(f"nothing left to train (trainer.steps={config.trainer.steps}); evaluating")
    elif left <= config.trainer.warmup:
        notes.append(
            f"all {left} steps are warm-up (trainer.warmup={config.trainer.warmup}): no medians in the summary"
        )
    return progress, notes


def _what_ran(config: RunConfig, facts: RunFacts) -> None:
    facts.counters = counter_rows(fused_ops.counters())
    # Baseline's own layers count nothing.
    asked = {getattr(config.comm, operator) for operator in families.operators(config.model.family)}
    facts.backend = "baseline" if asked == {"baseline"} else backend_that_ran(facts.counters)
    if facts.backend is not None:
        facts.link = device.describe_link(config.trainer, facts.backend)


def _data(config: RunConfig) -> tuple[Callable[..., Iterable[Any]], DataInfo]:
    """`trainers.data`, with rank 0 looking first: where data must be generated, the others wait."""
    source = families.batches(config)
    if dist.get_rank() == 0:
        source.data_info(config.data, config.model)
    dist.barrier()
    return source.build_batches, source.data_info(config.data, config.model)


def _join(config: RunConfig, rank: int, world: int) -> dist.Store:
    """The default process group, and the store behind it, in which ranks leave word when they fail."""
    timeout = timedelta(seconds=config.comm.timeout_s)
    shared, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=world, timeout=timeout)))
    store = dist.PrefixStore(f"trainers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    introduce(store, rank)
    backend = device.BACKENDS[config.trainer.device]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    fused_ops.set_timeout(config.comm.timeout_s)
    return store


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def raise_terminated(signum: int, frame: Any) -> None:
        raise TerminatedError("the launcher ended this rank")

    before = signal.signal(signal.SIGTERM, raise_terminated)
    yield
    signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say about each other, which nobody can act on."""
    for name in ("torchrec.distributed.utils", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # TorchRec builds on ShardedTensor and DDP's old argument names; FBGEMM's dense kernel brings its own autograd.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*(ShardedTensor|broadcast_buffers).*")
        # DeepSpeed calls collectives by the names that torch 2.11 has.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*(all_gather_into|reduce_scatter)_tensor.*")
        warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
        yield


def _write_failed(config: RunConfig, rank: int, store: dist.Store, summary: dict[str, Any], began: float) -> None:
    """Rank 0 writes it. Where rank 0 does not, the others do, without medians; the file is replaced whole."""
    if rank != 0:
        with contextlib.suppress(Exception):  # the store may have gone with rank 0
            store.wait([SUMMARY_WRITTEN], timedelta(seconds=GRACE_S))
            return
        path = Path(config.run_dir) / FILE_NAME
        if path.exists() and path.stat().st_mtime >= began:
            return
    try:
        write_summary(config.run_dir, summary)
        store.set(SUMMARY_WRITTEN, str(rank))
    except Exception as error:  # must not hide the failure itself
        print(f"rank {rank}: no summary written: {error}", file=sys.stderr, flush=True)


def _facts(config: RunConfig, world: int) -> RunFacts:
    return RunFacts(
        comm=config.comm.mode,
        ranks=world,
        seed=config.trainer.seed,
        model=config.model.name,
        data=config.data.kind,
        data_is_synthetic=config.data.kind in ("synthetic", "random"),
        device=config.trainer.device,
        run_dir=str(config.run_dir),
    )
