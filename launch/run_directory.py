"""Who owns a run's directory: rank 0 names and makes it, and tells the others.

Names made from the clock differ between ranks and coincide between jobs, so neither is left to chance.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

_stores: list[Any] = []  # a store that lives in this process must outlive the process group that shares it


def claim(path: Path) -> Path:
    """Makes and returns a directory that nobody else has claimed: `path`, or `path-1`, `path-2`, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for n in itertools.count():
        candidate = path if n == 0 else path.with_name(f"{path.name}-{n}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")


def share(run_dir: Path | None, rank: int, timeout_s: float) -> Path:
    """Every rank's `run_dir`: rank 0 gives it, the others pass None. Needs the environment torchrun sets."""
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    _stores.append(store)
    key = f"run_dir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        assert run_dir is not None
        store.set(key, str(run_dir))
        return run_dir
    return Path(store.get(key).decode())


def join_alone() -> None:
    """Sets the environment of a world of one, on a port that is this process's from the start."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
    )
