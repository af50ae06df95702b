"""A progress bar a phase, for commands that read or write files. Draws on a terminal, else says when a phase ends."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Call it with (phase, done, total); a new phase starts a new bar."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._draws = console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._draws,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()
        self._start = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)
        if done >= total and not self._draws and phase not in self._ended:
            self._ended.add(phase)
            print(f"{phase}: done after {time.monotonic() - self._start:.1f} s", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
