"""`metrics.jsonl`: one JSON object a line, on disk as soon as it is logged, and the way back from file to records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from trainers.loggers import strict_json

FILE_NAME = "metrics.jsonl"


class JsonlLogger:
    """Appends to `<run_dir>/metrics.jsonl`; a resumed run goes on in the same file.

    Every record gets `time` (seconds since the epoch) unless it has one.
    """

    run_id: str | None = None

    def __init__(self, run_dir: str | Path):
        self._path = Path(run_dir) / FILE_NAME
        self._file: IO[str] | None = None

    def start(self, config: Mapping[str, Any], run_id: str | None = None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self.log({"event": "start", "wandb_id": run_id, "config": config})

    def log(self, event: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("log() before start() or after finish()")
        self._file.write(strict_json.dumps({"event": event["event"], "time": time.time(), **event}) + "\n")
        self._file.flush()

    def finish(self, status: str, reason: str | None = None, summary: Mapping[str, Any] | None = None) -> None:
        if self._file is None:
            return
        try:
            self.log({"event": "end", "status": status, "reason": reason})
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            self._file = None


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Every complete record of a `metrics.jsonl`, of a live run too: a last line without its newline is left out.

    Raises ValueError (file, line number, reason) for a complete line that is no JSON object.
    """
    events = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                events.append(strict_json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return events


def surviving(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The train and eval records that count: a run that resumed from an earlier step wrote some steps twice.

    Where a train record's step does not grow, training went back to it, so everything logged from that step on is void.
    """
    kept: list[dict[str, Any]] = []
    last = 0
    for event in events:
        if event.get("event") not in ("train", "eval"):
            continue
        if event["event"] == "train":
            if event["step"] <= last:
                kept = [earlier for earlier in kept if earlier["step"] < event["step"]]
            last = event["step"]
        kept.append(dict(event))
    return kept


def _drop_torn_line(path: Path) -> None:
    """Cut what a killed writer left of its last record, so that the next one starts on a line of its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        block = 1 << 16
        end = size
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
