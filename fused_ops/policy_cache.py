"""Times that `comm="auto"` has measured, on disk: `policy.json` beside the compiled libraries.

One object: {a decision's name: {backend: milliseconds}}. A name holds everything that the times depend on, versions
included, so what another version wrote is never found.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
import os
from pathlib import Path

from fused_ops.compiler import cache_dir

logger = logging.getLogger("fused_ops")


def read(name: str) -> dict[str, float] | None:
    """Times by backend; None where they are not known."""
    return _load(_path()).get(name)


def write(name: str, times: dict[str, float]) -> None:
    """Add those times to the file. A directory that cannot be written to is said once and costs a measurement a job."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # every rank writes: they need not share a file system
            known = _load(path)
            if known.get(name) == times:
                return
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(json.dumps({**known, name: times}, indent=1))
            os.replace(partial, path)
    except OSError as error:
        _warn_once(f"what comm='auto' measured cannot be kept in {path}: {error}")


def _path() -> Path:
    return cache_dir() / "policy.json"


def _load(path: Path) -> dict[str, dict[str, float]]:
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn_once(f"{path} cannot be read ({error}): comm='auto' measures again")
        return {}
    if not isinstance(entries, dict) or not all(map(_are_times, entries.values())):
        _warn_once(f"{path} does not hold times by backend: comm='auto' measures again")
        return {}
    return entries


def _are_times(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(ms, float) and math.isfinite(ms) for ms in entry.values())


@functools.cache
def _warn_once(problem: str) -> None:
    logger.warning("%s", problem)
