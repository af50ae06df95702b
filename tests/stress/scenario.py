"""What a scenario of the stress test is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.stress.lab import Lab


@dataclass(frozen=True)
class Scenario:
    """Runs on every rank, checks itself, and returns one line of detail."""

    run: Callable[[Lab], str]
    devices: tuple[str, ...] = ("cpu", "cuda")
    smallest_world: int = 1
    kills: bool = False  # the last rank dies, so it needs processes of its own
    fixed_calls: bool = False  # --calls does not change its length
    weight: float = 1.0  # its share of --calls


def register_in(scenarios: dict[str, Scenario]) -> Callable:
    """A decorator that takes Scenario's options and adds the function to `scenarios`."""

    def scenario(**options) -> Callable:  # type: ignore[no-untyped-def]
        def register(function: Callable[[Lab], str]) -> Callable[[Lab], str]:
            scenarios[function.__name__] = Scenario(function, **options)
            return function

        return register

    return scenario
