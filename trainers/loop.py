"""The training loop, for every family, every engine and either `comm`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from trainers import checkpoint
from trainers.checkpoint import Progress
from trainers.config import RunConfig
from trainers.engine import Engine, Feed, Work
from trainers.schedule import learning_rate_factor
from trainers.step_timing import StepTimer


class NonFiniteLossError(RuntimeError):
    """Raised on every rank in the same step; names the ranks whose loss it was and where their batches are."""


@dataclass
class Run:
    """A run in progress. `batches(split, start)` yields this replica's batches from global batch `start` on."""

    config: RunConfig
    engine: Engine
    batches: Callable[[str, int], Iterator[Any]]
    log: Callable[[dict[str, Any]], None]  # takes every record; rank 0 alone keeps them
    progress: Progress


def train(run: Run) -> None:
    """Train to `trainer.steps`, or until no replica has samples; evaluate and save on the way and at the end."""
    config, trainer, progress = run.config, run.config.trainer, run.progress
    timer = StepTimer(run.engine.device, run.engine.exchanges())
    feed = run.engine.feed(run.batches("train", progress.batches), timer)
    saved = evaluated = first = progress.step
    if progress.step < trainer.steps:
        feed.fetch()
        feed.send()
    with _bar(trainer.progress, progress.step, trainer.steps) as show, _Profile(config) as profile:
        while progress.step < trainer.steps:
            profile.before(progress.step - first)
            record = _train_step(run, feed, timer)
            if record is None:
                break
            run.log(record)
            show(record)
            if trainer.eval_every and progress.step % trainer.eval_every == 0:
                evaluated = progress.step
                with timer.pause():
                    _evaluate(run)
            if trainer.checkpoint_every and progress.step % trainer.checkpoint_every == 0:
                saved = progress.step
                with timer.pause():
                    checkpoint.save(config, run.engine, progress)
    if evaluated != progress.step or evaluated == first:
        _evaluate(run)
    if trainer.checkpoint_every and saved != progress.step:
        checkpoint.save(config, run.engine, progress)


def _train_step(run: Run, feed: Feed, timer: StepTimer) -> dict[str, Any] | None:
    """One optimizer step of `optim.accumulate` batches; its record, or None where no replica has a sample left."""
    config, engine, progress = run.config, run.engine, run.progress
    replicas, accumulate = engine.replica.count, config.optim.accumulate
    factor = learning_rate_factor(config.optim, progress.step, config.trainer.steps)
    engine.set_learning_rate(factor)
    loss_sum, total, samples = 0.0, 0, 0
    for part in range(accumulate):
        work = feed.take()
        here = work.total
        if here == 0 and part == 0:
            return None
        # Where data ends within a step, this empty batch closes it: its backward reduces what was accumulated.
        last = part == accumulate - 1 or here == 0
        more = not last or progress.step + 1 < config.trainer.steps
        if more:
            feed.fetch()
        part_sum = engine.loss(work)
        sums, arrived = _gather(part_sum)
        if more:
            feed.send()
        # Gradients are averaged over replicas, which may hold different numbers of samples: the mean over all of them.
        loss = part_sum * (replicas / (max(here, 1) * accumulate))
        with timer.backward(loss):
            engine.backward(loss, last)
        with timer.part("exposed"):
            arrived.wait()
        losses = torch.cat(sums).cpu()
        _stop_if_not_finite(run, losses.tolist(), work)
        loss_sum += float(losses[list(engine.replica.leaders)].sum())
        total, samples = total + here, samples + work.samples
        progress.batches += here > 0
        if last:
            break
    engine.step()
    engine.check(work)
    progress.step += 1
    times = timer.end_step()
    return {
        "event": "train",
        "step": progress.step,
        "loss": loss_sum / total,
        "lr": config.optim.lr * factor,
        **asdict(times),
        **engine.throughput(total, samples, times.step_ms / 1e3),
    }


def _evaluate(run: Run) -> None:
    """Log the evaluation of every sample of the validation split (or of `trainer.eval_batches` batches of it)."""
    limit, engine = run.config.trainer.eval_batches, run.engine
    feed = engine.feed(run.batches("val", 0), StepTimer(engine.device))
    evaluation = engine.evaluation()
    engine.model.eval()
    with torch.no_grad():
        done = 0
        feed.fetch()
        feed.send()
        while True:
            work = feed.take()
            done += 1
            more = work.total > 0 and (limit is None or done < limit)
            if more:
                feed.fetch()
            evaluation.add(work)
            engine.check(work)
            if not more:
                break
            feed.send()
    engine.model.train()
    event = evaluation.event(run.progress.step)
    if event is not None:
        run.log(event)


def _gather(value: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
    """Every rank's scalar as float64 [1], once the returned work is done."""
    mine = value.detach().double().view(1)
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    return sums, dist.all_gather(sums, mine, async_op=True)


def _stop_if_not_finite(run: Run, sums: list[float], work: Work) -> None:
    bad = [rank for rank, value in enumerate(sums) if not math.isfinite(value)]
    if not bad:
        return
    step = run.progress.step + 1
    files = {rank: Path(run.config.run_dir) / f"nonfinite_step{step}_rank{rank}.pt" for rank in bad}
    if dist.get_rank() in bad:
        torch.save(dict(work.tensors()), files[dist.get_rank()])
    dist.barrier()  # nobody ends the job before the batches are written
    losses = "; ".join(f"rank {rank} ({sums[rank]}, batch saved as {file})" for rank, file in files.items())
    raise NonFiniteLossError(f"step {step}: the loss is not finite on {losses}")


@contextlib.contextmanager
def _bar(wanted: bool, start: int, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar on rank 0, where stderr is a terminal."""
    if not wanted or dist.get_rank() != 0 or not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, completed=start)
        yield lambda record: bar.update(
            task,
            completed=record["step"],
            description=f"loss {record['loss']:.4f}  {record['samples_per_s']:,.0f} samples/s",
        )


class _Profile:
    """`trainer.profile_steps` steps after warm-up as a Chrome trace, `<run_dir>/trace_rank<r>.json`."""

    def __init__(self, config: RunConfig) -> None:
        self._first = config.trainer.warmup
        self._count = config.trainer.profile_steps
        self._path = Path(config.run_dir) / f"trace_rank{dist.get_rank()}.json"
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> _Profile:
        return self

    def before(self, step: int) -> None:
        if self._count and step == self._first:
            self._profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._profiler.start()
        elif step == self._first + self._count:
            self._stop()

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            profiler.export_chrome_trace(str(self._path))
