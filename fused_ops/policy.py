"""`comm="auto"`: which backend a call takes, measured once, agreed by all ranks and kept on disk.

A decision is made at the first call of its kind on a (group, channel), on that call's own inputs, while all ranks are in
the call. From then on it is a dictionary lookup without communication: a kind is made of facts that all ranks know alike.
What counts is the forward's time on the slowest rank; a backward that is another operator follows its forward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from fused_ops import policy_cache
from fused_ops.errors import CommunicationError, PeerAbortedError
from fused_ops.policy_conditions import conditions, own_conditions
from fused_ops.policy_timing import mean_ms, measure, outside_of_exposed_time
from fused_ops.symmetric.group import GroupContext, check_errors

logger = logging.getLogger("fused_ops")


@dataclass(frozen=True)
class Call:
    """One call of an operator as the policy sees it.

    shape: what all ranks know alike of its size, in words, rounded up to powers of two (`bucket`).
    load: what this rank alone knows of its size, such as its number of lookups; the ranks' sum is part of the name on disk.
    run: the call, on the backend's module that it is given; it changes no input. None in a backward that follows its forward.
    """

    shape: str
    dtype: torch.dtype
    channel: int
    load: int = 0
    run: Callable[[ModuleType], object] | None = None


@dataclass(frozen=True)
class Decision:
    backend: str
    reason: str


_Kind = tuple[str, str, torch.dtype, torch.device, int]
_decisions: weakref.WeakKeyDictionary[GroupContext, dict[_Kind, Decision]] = weakref.WeakKeyDictionary()


def bucket(count: int, unit: str) -> str:
    """`count` rounded up to a power of two, in words."""
    return f"2^{(count - 1).bit_length()} {unit}" if count else f"0 {unit}"


def recall(operator: str, device: torch.device, group: GroupContext, call: Call) -> Decision | None:
    """What was decided for calls of this kind, the same on every rank; None where nothing was yet."""
    return _decisions.get(group, {}).get(_kind(operator, device, call))


def decide(
    operator: str, backends: Mapping[str, ModuleType], device: torch.device, group: GroupContext, call: Call
) -> Decision:
    """The fastest of `backends` (the first is a fused one), for this call and all later ones of its kind. Collective.

    Raises what the first backend raises for bad input, on every rank; ValueError inside a CUDA graph capture, and in a
    backward without a forward.
    """
    unknown = f"{operator}: comm='auto' has measured no forward of [{call.shape}] on channel {call.channel}"
    if call.run is None:
        raise ValueError(f"{unknown} of group '{group.name}', and a backward runs where its forward ran")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{unknown} yet, and cannot inside a CUDA graph capture: call the operator once with this shape before capturing"
        )
    runs = {name: _bind(call.run, backend) for name, backend in backends.items()}
    with outside_of_exposed_time():
        times, source = _agreed_times(operator, runs, device, group, call)
    backend = _fastest(times)
    others = ", ".join(f"{ms:.3g} ms" for name, ms in times.items() if name != backend)
    decision = Decision(backend, f"auto: {times[backend]:.3g} ms against {others} ({source})")
    if group.rank == 0:
        figures = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())
        kind = f"{call.shape}, {call.dtype}, {group.world} ranks, channel {call.channel}"
        logger.info("auto: %s [%s]: %s -> %s (%s)", operator, kind, figures, backend, source)
    _decisions.setdefault(group, {})[_kind(operator, device, call)] = decision
    return decision


def _kind(operator: str, device: torch.device, call: Call) -> _Kind:
    return operator, call.shape, call.dtype, device, call.channel


def _bind(run: Callable[[ModuleType], object], backend: ModuleType) -> Callable[[], object]:
    return lambda: run(backend)


def _fastest(times: Mapping[str, float]) -> str:
    return min(times, key=times.__getitem__)


def _agreed_times(
    operator: str, runs: Mapping[str, Callable[[], object]], device: torch.device, group: GroupContext, call: Call
) -> tuple[Mapping[str, float], str]:
    """(milliseconds on the slowest rank by backend, where they are from). The fastest is the same on every rank."""
    fused = runs[next(iter(runs))]
    # Fused first: it checks the inputs and compares the ranks' layouts, and raises on every rank. Baseline cannot.
    fused()
    what = f"auto {operator} channel {call.channel}"
    ranks = _exchange_or_raise(operator, what, {**own_conditions(device), "load": call.load}, device, group)
    load = bucket(sum(said["load"] for said in ranks), "of load")
    name = f"{operator} {call.dtype}; {call.shape}; {load}; {conditions(ranks, device, group)}"
    known = policy_cache.read(name) or {}
    cached = _fastest(known) if known.keys() == runs.keys() else None
    answers = group.exchange(what, {"cached": cached, "ms": mean_ms(fused, 1, device)})
    if cached is not None and all(answer["cached"] == cached for answer in answers):
        return known, "from the cache"
    measured = measure(runs, device, max(answer["ms"] for answer in answers))
    of_ranks = group.exchange(what, {"ms": measured})
    slowest = {backend: max(said["ms"][backend] for said in of_ranks) for backend in runs}
    policy_cache.write(name, slowest)
    return slowest, "measured"


def _exchange_or_raise(operator: str, what: str, mine: dict, device: torch.device, group: GroupContext) -> list[dict]:
    """Every rank's `mine`; raises on all ranks what a device kernel of the first call has recorded on any."""
    recorded: Exception | None = None
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    try:
        check_errors(group.name)
    except (ValueError, CommunicationError) as error:
        recorded = error
    ranks = group.exchange(what, {**mine, "error": None if recorded is None else str(recorded)})
    if recorded is not None:
        raise recorded
    for rank, said in enumerate(ranks):
        if said["error"] is not None:
            raise PeerAbortedError(f"{operator}: rank {rank} of group '{group.name}' failed: {said['error']}")
    return ranks
