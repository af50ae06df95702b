"""The training loop, for every engine and either `comm`."""

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
from torch.nn.functional import binary_cross_entropy_with_logits

from trainers import checkpoint, metrics
from trainers.checkpoint import Progress
from trainers.config import RunConfig
from trainers.data.batch import Batch
from trainers.engines import Engine
from trainers.feed import Feed
from trainers.schedule import learning_rate_factor
from trainers.step_timing import StepTimer


class NonFiniteLossError(RuntimeError):
    """Raised on every rank in the same step; names the ranks whose loss it was and where their batches are."""


@dataclass
class Run:
    """A run in progress. `batches(split, start)` yields this rank's batches from global batch `start` on."""

    config: RunConfig
    engine: Engine
    batches: Callable[[str, int], Iterator[Batch]]
    log: Callable[[dict[str, Any]], None]  # takes every record; rank 0 alone keeps them
    progress: Progress


def train(run: Run) -> None:
    """Train to `trainer.steps`, or until no rank has samples; evaluate and save on the way and at the end."""
    config, trainer, progress = run.config, run.config.trainer, run.progress
    timer = StepTimer(run.engine.device, run.engine.exchanges())
    feed = Feed(run.batches("train", progress.batches), run.engine, timer, config.model)
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
    """One optimizer step of `optim.accumulate` batches; its record, or None where no rank has a sample left."""
    config, engine, progress = run.config, run.engine, run.progress
    world, accumulate = dist.get_world_size(), config.optim.accumulate
    factor = learning_rate_factor(config.optim, progress.step)
    engine.set_learning_rate(factor)
    loss_sum, samples = 0.0, 0
    for part in range(accumulate):
        batch, indices = feed.take()
        here = sum(indices.batch_sizes)
        if here == 0 and part == 0:
            return None
        # Where data ends within a step, this empty batch closes it: its backward reduces what was accumulated.
        last = part == accumulate - 1 or here == 0
        more = not last or progress.step + 1 < config.trainer.steps
        if more:
            feed.fetch()
        logits = engine.forward(batch.dense, indices)
        part_sum = binary_cross_entropy_with_logits(logits, batch.labels.float(), reduction="sum")
        sums, arrived = _gather(part_sum)
        if more:
            feed.send()
        # Gradients are averaged over ranks, which may hold different numbers of samples: the mean over all of them.
        loss = part_sum * (world / (max(here, 1) * accumulate))
        with timer.backward(loss):
            engine.backward(loss, last)
        with timer.part("exposed"):
            arrived.wait()
        losses = torch.cat(sums).cpu()
        _stop_if_not_finite(run, losses.tolist(), batch, logits)
        loss_sum, samples = loss_sum + float(losses.sum()), samples + here
        progress.batches += here > 0
        if last:
            break
    engine.step()
    engine.check(indices)
    progress.step += 1
    times = timer.end_step()
    return {
        "event": "train",
        "step": progress.step,
        "loss": loss_sum / samples,
        "lr": config.optim.lr * factor,
        **asdict(times),
        "samples_per_s": samples / times.step_ms * 1e3,
    }


def _evaluate(run: Run) -> None:
    """Log AUC, NE and loss over every sample of the validation split (or `trainer.eval_batches` batches of it)."""
    limit = run.config.trainer.eval_batches
    feed = Feed(run.batches("val", 0), run.engine, StepTimer(run.engine.device), run.config.model)
    logits, labels = [torch.zeros(0)], [torch.zeros(0)]
    run.engine.model.eval()
    with torch.no_grad():
        done = 0
        feed.fetch()
        feed.send()
        while True:
            batch, indices = feed.take()
            done += 1
            more = sum(indices.batch_sizes) > 0 and (limit is None or done < limit)
            if more:
                feed.fetch()
            logits.append(run.engine.forward(batch.dense, indices).cpu())
            labels.append(batch.labels.float().cpu())
            run.engine.check(indices)
            if not more:
                break
            feed.send()
    run.engine.model.train()
    all_logits, all_labels = metrics.gather(torch.cat(logits)), metrics.gather(torch.cat(labels))
    if all_logits is not None and all_labels is not None:
        run.log(metrics.evaluate(all_logits, all_labels).as_event(run.progress.step))


def _gather(value: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
    """Every rank's scalar as float64 [1], once the returned work is done."""
    mine = value.detach().double().view(1)
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    return sums, dist.all_gather(sums, mine, async_op=True)


def _stop_if_not_finite(run: Run, sums: list[float], batch: Batch, logits: torch.Tensor) -> None:
    bad = [rank for rank, value in enumerate(sums) if not math.isfinite(value)]
    if not bad:
        return
    step = run.progress.step + 1
    files = {rank: Path(run.config.run_dir) / f"nonfinite_step{step}_rank{rank}.pt" for rank in bad}
    if dist.get_rank() in bad:
        sparse = batch.sparse
        parts = {"dense": batch.dense, "labels": batch.labels, "logits": logits.detach()}
        parts |= {"keys": sparse.keys(), "values": sparse.values(), "lengths": sparse.lengths()}
        torch.save(parts, files[dist.get_rank()])
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
