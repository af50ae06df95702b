"""Which backend runs a call: the one asked for, the fastest, or baseline with the reason said."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType

import torch

from fused_ops import policy
from fused_ops.counters import count
from fused_ops.errors import BackendUnavailableError
from fused_ops.symmetric.group import GroupContext

logger = logging.getLogger("fused_ops")

# In order: the first that has the operator, and takes a call of that size, is the device's.
FUSED_BACKENDS_OF_DEVICE = {"cpu": ("host",), "cuda": ("cuda", "triton")}
DEVICES_OF_BACKEND = {"host": ("cpu",), "unfused": ("cpu", "cuda"), "cuda": ("cuda",), "triton": ("cuda",)}


def choose(
    operator: str,
    comm: str,
    require_fused: bool,
    device: torch.device,
    group: GroupContext,
    phase: str = "",
    describe: Callable[[], policy.Call] | None = None,
    size: int = 0,
) -> ModuleType:
    """The module `fused_ops.backends.<backend>.<operator>` that is to run this call.

    comm: "baseline"; "fused" (the device's fused backend, baseline where none can run: warned once, counted with its
    reason, an error under require_fused); "auto" (the fastest of both, see `policy`; baseline where no fused one can run);
    or a backend's name, which never falls back.
    phase: of an operator whose backward is another one; it is counted as `<operator>_<phase>`.
    describe: the call as "auto" has to know it; asked under "auto" only.
    size: of the call, as all ranks know it; a backend's module may have `takes(size)`, false where another is to run.
    """
    if require_fused and comm in ("baseline", "auto"):
        why = ", which may choose baseline: use comm='fused'" if comm == "auto" else ""
        raise ValueError(f"require_fused=True contradicts comm='{comm}'{why}")
    if comm == "baseline":
        return _use(operator, "baseline", "asked for", phase)
    if comm == "auto":
        if describe is None:
            raise ValueError(f"{operator} does not take comm='auto'")
        return _use(operator, *_fastest(operator, device, group, describe(), size), phase)
    named = comm != "fused"
    backend = comm if named else _fused_backend(operator, device, size)
    if named and comm not in DEVICES_OF_BACKEND:
        raise ValueError(
            f"comm must be 'fused', 'baseline', 'auto' or a backend ({', '.join(DEVICES_OF_BACKEND)}), got {comm!r}"
        )
    if named and device.type not in _devices(comm):
        raise ValueError(f"backend '{comm}' takes {_devices(comm)[0]} tensors, got one on {device}")
    problem = _problem(operator, backend, device, group)
    if problem is None:
        return _use(operator, backend, "asked for" if named else "fused", phase)
    if named or require_fused:
        raise BackendUnavailableError(f"{operator}: {problem}")
    _warn_once(operator, problem)
    return _use(operator, "baseline", problem, phase)


def _fused_backend(operator: str, device: torch.device, size: int) -> str:
    """The device's for such a call; the first of them where none has the operator, "" where the device has none."""
    backends = FUSED_BACKENDS_OF_DEVICE.get(device.type, ("",))
    return next((b for b in backends if _exists(operator, b) and _takes(operator, b, size)), backends[0])


def _takes(operator: str, backend: str, size: int) -> bool:
    if backend == "triton":  # whose files need a library that may not be there
        return True
    takes = getattr(_module(operator, backend), "takes", None)
    return takes is None or takes(size)


def _fastest(operator: str, device: torch.device, group: GroupContext, call: policy.Call, size: int) -> tuple[str, str]:
    """(backend, reason): measured where that was not done before; baseline where no fused backend can run."""
    decision = policy.recall(operator, device, group, call)
    if decision is None:
        fused = _fused_backend(operator, device, size)
        problem = _problem(operator, fused, device, group)
        if problem is not None:
            _warn_once(operator, problem)
            return "baseline", problem
        modules = {backend: _module(operator, backend) for backend in (fused, "baseline")}
        decision = policy.decide(operator, modules, device, group, call)
    return decision.backend, decision.reason


def _problem(operator: str, backend: str, device: torch.device, group: GroupContext) -> str | None:
    """Why that backend cannot run here, the same on every rank of the group; None when it can."""
    if not backend:
        return f"no fused backend for {device.type} tensors"
    if not _exists(operator, backend):
        return f"the {backend} backend has no {operator}"
    if backend == "cuda" or (backend == "unfused" and device.type == "cuda"):
        from fused_ops.symmetric.cuda_memory import why_unavailable

        return why_unavailable(group, device)
    if backend == "triton":
        from fused_ops.backends.triton import availability

        return availability.why_unavailable(group, device)
    return group.unreachable


def _devices(backend: str) -> tuple[str, ...]:
    """Types of the devices whose tensors a backend takes."""
    if backend == "triton":
        from fused_ops.backends.triton import availability

        return (availability.device_type(),)
    return DEVICES_OF_BACKEND[backend]


@functools.cache
def _exists(operator: str, backend: str) -> bool:
    try:
        return importlib.util.find_spec(f"fused_ops.backends.{backend}.{operator}") is not None
    except ModuleNotFoundError:
        return False


def _use(operator: str, backend: str, reason: str, phase: str) -> ModuleType:
    count(f"{operator}_{phase}" if phase else operator, backend, reason)
    return _module(operator, backend)


def _module(operator: str, backend: str) -> ModuleType:
    return importlib.import_module(f"fused_ops.backends.{backend}.{operator}")


@functools.cache
def _warn_once(operator: str, problem: str) -> None:
    logger.warning("%s runs on baseline: %s", operator, problem)
