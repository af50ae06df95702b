"""What a logger is, and the one object that a training loop talks to.

    with make_loggers(config.logger, run_dir, rank) as loggers:
        loggers.start(resolved_config, run_id=checkpointed_id)
        loggers.log({"event": "train", "step": 1, "loss": 0.69, ...})
        loggers.finish("ok", summary=summary)

Leaving the `with` block finishes every logger whatever happened: with `status="failed"` and the exception as reason
where one is on its way out and nobody called `finish` before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

STATUSES = ("ok", "failed")
"""`ok`: all steps done. `failed`: anything else (an exception, a non-finite loss, an interrupt); `reason` says what."""


class Logger(Protocol):
    """One sink of a run's records; lives on rank 0 only."""

    run_id: str | None
    """The id under which an outside service knows the run; None where there is no such service."""

    def start(self, config: Mapping[str, Any], run_id: str | None = None) -> None:
        """Begin a run, or go on with run `run_id`. `config` is the resolved config as plain containers."""

    def log(self, event: Mapping[str, Any]) -> None:
        """Take one record. `event["event"]` names its kind; train and eval records carry a `step`."""

    def finish(self, status: str, reason: str | None = None, summary: Mapping[str, Any] | None = None) -> None:
        """End the run. A second call does nothing."""


class Loggers:
    """Several loggers as one. Empty on every rank but 0, where each method is free."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)
        self._finished = False

    @property
    def run_id(self) -> str | None:
        """The id to keep in a checkpoint and to hand to `start` on resume; None off rank 0."""
        return next((logger.run_id for logger in self._loggers if logger.run_id), None)

    def start(self, config: Mapping[str, Any], run_id: str | None = None) -> None:
        for logger in self._loggers:
            logger.start(config, run_id)

    def log(self, event: Mapping[str, Any]) -> None:
        for logger in self._loggers:
            logger.log(event)

    def finish(self, status: str, reason: str | None = None, summary: Mapping[str, Any] | None = None) -> None:
        """Finish every logger, also after one of them fails; the first failure is raised at the end."""
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}; allowed: {', '.join(STATUSES)}")
        if self._finished:
            return
        self._finished = True
        failure: BaseException | None = None
        for logger in self._loggers:
            try:
                logger.finish(status, reason, summary)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("ok")
            return
        try:
            self.finish("failed", f"{type(error).__name__}: {error}")
        except Exception as second:
            error.add_note(f"while finishing the loggers: {type(second).__name__}: {second}")
