"""Run a function on several ranks, each a real process.

    losses = run_ranks(2, train_a_little, config)     # one return value a rank

The function must live at the top level of a module, and its arguments and return value must pickle. It finds the
default process group ready (`backend`, over a file store) and one torch thread a process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server, and so every rank, inherits it
_context = multiprocessing.get_context("forkserver")  # imports torch once, not once a rank
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fused_ops", "pytest"])


# As `env` of ranks that are killed inside a kernel: killing one client of an MPS daemon can take the others down.
WITHOUT_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time; the message holds its traceback."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    may_die: Collection[int] = (),
    env: dict[str, str] | None = None,
) -> list[Any]:
    """`function(*args)` on `world` ranks; the return values in rank order (None for a rank of `may_die` that died).

    On the first failure, or after `timeout` seconds, every rank is killed and RankError says what happened. A rank lives
    on, with its process group, until all have returned. `backend=""` makes no process group.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        ranks = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, world, f"file://{folder}/store", backend, env or {}, timeout, function, args)
            process = _context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect(ranks, time.monotonic() + timeout, timeout, may_die)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _collect(ranks: list, deadline: float, timeout: float, may_die: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    pending: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        arrived = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not arrived:
            raise RankError(f"after {timeout:g} s ranks {sorted(pending.values())} had not returned")
        for connection in arrived:
            rank = pending.pop(connection)
            try:
                kind, value = ranks[rank][1].recv()
            except EOFError:
                ranks[rank][0].join(timeout=5)
                if rank in may_die:
                    continue
                raise RankError(f"rank {rank} died with exit code {ranks[rank][0].exitcode}") from None
            if kind == "error":
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    for _, connection in ranks:
        with contextlib.suppress(OSError):  # one that died
            connection.send("leave")
    for rank, (process, _) in enumerate(ranks):
        process.join(timeout=max(5.0, deadline - time.monotonic()))
        if process.exitcode != 0 and rank not in may_die:
            raise RankError(f"rank {rank} returned, then ended with exit code {process.exitcode} (None: it hung)")
    return results


def _rank_main(
    connection: Connection,
    rank: int,
    world: int,
    store: str,
    backend: str,
    env: dict[str, str],
    timeout: float,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **env})
    torch.set_num_threads(1)
    try:
        if backend:
            dist.init_process_group(
                backend, init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
        message = ("result", function(*args))
    except BaseException:
        message = ("error", traceback.format_exc())
    connection.send(message)
    if message[0] == "result":
        connection.recv()
        _leave_cleanly()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] == "result" else 1)


def take_card() -> Any:
    """On a rank: the device it is to use, made current; the ranks share the cards evenly, and each card by grid size."""
    import torch

    from trainers import card

    ranks_per_gpu = -(-int(os.environ["WORLD_SIZE"]) // max(1, torch.cuda.device_count()))
    return card.take_card(int(os.environ["LOCAL_RANK"]), ranks_per_gpu)


def _leave_cleanly() -> None:
    """A gloo job may abort after correct output when its threads outlive the interpreter: end the group, then leave."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
