"""Weights & Biases, on rank 0, offline unless `logger.wandb_mode=online`.

`logger.wandb_mode` decides, not `WANDB_MODE`. Charts use `trainer/step` as their axis, never W&B's own counter, so that
a run which resumed from an earlier step keeps its order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

STEP_METRIC = "trainer/step"
MODES = ("offline", "online", "disabled")
INIT_TIMEOUT_S = 60.0
_NOT_METRICS = ("event", "step", "time")


class WandbLogger:
    """Writes under `<run_dir>/wandb/`. Metrics are `train/<key>`, `eval/<key>`; the run's medians `summary/<key>`.

    Tags are the comm mode, `tags`, and the backend that ran as soon as a record or the summary carries `backend`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        project: str,
        entity: str | None = None,
        group: str | None = None,
        mode: str = "offline",
        tags: Sequence[str] = (),
    ):
        if mode not in MODES:
            raise ValueError(f"logger.wandb_mode is {mode!r}; allowed: {', '.join(MODES)}")
        self._run_dir, self._mode, self._tags = Path(run_dir), mode, list(tags)
        self._project, self._entity, self._group = project, entity, group
        self._run: wandb.Run | None = None
        self.run_id: str | None = None

    def start(self, config: Mapping[str, Any], run_id: str | None = None) -> None:
        """Raises RuntimeError where W&B is asked to be online and has no key, or it does not start."""
        if self._mode == "online" and not has_key():
            raise RuntimeError(
                "logger.wandb_mode=online needs a W&B key and none is configured: run `wandb login`, set "
                "WANDB_API_KEY, or use logger.wandb_mode=offline and `wandb sync` later"
            )
        comm = config.get("comm")
        comm_mode = comm.get("mode") if isinstance(comm, Mapping) else comm
        try:
            self._run = wandb.init(
                project=self._project,
                entity=self._entity,
                group=self._group,
                name=self._run_dir.name,
                tags=_unique([comm_mode, *self._tags]),
                config=dict(config),
                dir=self._run_dir,
                mode=self._mode,  # type: ignore[arg-type]
                id=run_id,
                # Offline there is no server to resume from: the kept id is what joins the parts when they are synced.
                resume="allow" if self._mode == "online" and run_id else None,
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off"),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"W&B did not start: {reason}; logger.wandb_mode=offline needs no server") from error
        self.run_id = self._run.id
        self._run.define_metric(STEP_METRIC)
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric=STEP_METRIC)

    def log(self, event: Mapping[str, Any]) -> None:
        if self._run is None:
            raise RuntimeError("log() before start() or after finish()")
        if event.get("backend"):
            self._add_tag(event["backend"])
        if event["event"] not in ("train", "eval"):
            return
        metrics = {
            f"{event['event']}/{key}": value
            for key, value in event.items()
            if key not in _NOT_METRICS and isinstance(value, (int, float))
        }
        self._run.log({STEP_METRIC: event["step"], **metrics})

    def finish(self, status: str, reason: str | None = None, summary: Mapping[str, Any] | None = None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            if summary is not None:
                if summary.get("backend"):
                    self._add_tag(summary["backend"], run)
                run.summary.update({f"summary/{key}": value for key, value in summary.items() if _is_number(value)})
            run.summary.update({"status": status, "reason": reason})
        finally:
            run.finish(exit_code=0 if status == "ok" else 1)

    def _add_tag(self, tag: str, run: wandb.Run | None = None) -> None:
        run = run or self._run
        assert run is not None
        if tag not in (run.tags or ()):
            run.tags = (*(run.tags or ()), tag)


def has_key() -> bool:
    """Whether W&B finds credentials (environment, netrc, its settings). Asks no server and never prompts."""
    return bool(wandb.api.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))


def _unique(tags: Sequence[str | None]) -> list[str]:
    return list(dict.fromkeys(tag for tag in tags if tag))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
