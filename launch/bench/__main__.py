"""Time the operators' backends against each other and write rows.

    python -m launch.bench op=embedding_all_to_all ranks=2 device=cpu pooling=[1,20,70] out=results.json
    python -m launch.bench op=all_to_all ranks=2 kib=[16,1024,16384]
    python -m launch.bench op=gemm_all_reduce ranks=2 m=[1,8,64,1024] n=4096 k=4096
    python -m launch.bench op=embedding_all_to_all device=cuda ranks=4 ranks_per_gpu=4 configs=one_gpu link=[peer,pinned]

With ranks_per_gpu above 1 it sets up a one-GPU lab and ends it (docs/one-gpu-lab.md); on a machine with a GPU a rank
nothing is needed. Rows: op, backend, device, link (same-GPU | PCIe host | PCIe peer | NVLink | CPU host), ranks, the
shape's fields, phase (forward | forward_backward | compute_alone | exchange_alone), ms (median over interleaved rounds of
the slowest rank), p10_ms, p90_ms, limit_ms and its formula, and what ran: versions, commit, command, GPU.

Exit codes: 0 measured; 1 a rank failed (the rows so far are written); 2 the settings or the lab won't do.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from launch.bench import facts, operators
from launch.bench.ranks import BenchError, Message, positions, run_on_ranks
from launch.bench.report import print_block
from launch.bench.settings import BenchSettings, SettingsError, backends, parse
from launch.bench.variants import USES_LIBRARY
from launch.lab import LabError, OneGpuLab


def main(words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        _print_keys()
        return 0
    try:
        settings = parse(words)
        lab = OneGpuLab(
            settings.ranks_per_gpu,
            nccl_path=settings.nccl,
            use_mps=settings.mps == "on",
            needs_nccl=bool(set(USES_LIBRARY) & set(backends(settings))),
        )
    except (SettingsError, LabError) as error:
        print(f"launch.bench: {error}", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    rows = Rows(settings, {**facts.of_run(settings, words), "mps": lab.mps})
    with lab:
        try:
            run_on_ranks(settings, lambda message: rows.take(message, lab))
        except (BenchError, LabError) as error:
            print(f"launch.bench: {error}", file=sys.stderr)
            return 1
        finally:
            rows.write()
            signal.signal(signal.SIGTERM, before)
    return 0


class Rows:
    """The rows of a run, as blocks come in; written in the order of the shapes."""

    def __init__(self, settings: BenchSettings, run_facts: dict[str, Any]) -> None:
        self.settings = settings
        self.facts = run_facts
        self.blocks: dict[int, list[dict[str, Any]]] = {}
        self.console = Console(width=110)
        self.shapes = [shape for _, shape in positions(settings)]

    def take(self, message: Message, lab: OneGpuLab) -> None:
        kind, content = message
        if kind == "ready":
            lab.check_in_use()
        elif kind == "note":
            print(content, flush=True)
        else:
            position, rows = content
            if not rows:
                return
            self.blocks[position] = [{**self.facts, **row} for row in rows]
            print_block(self.blocks[position], [f.name for f in fields(self.shapes[position])], self.console)

    def write(self) -> None:
        if not self.settings.out or not self.blocks:
            return
        rows = [row for position in sorted(self.blocks) for row in self.blocks[position]]
        path = Path(self.settings.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{len(rows)} rows in {path}")


def _print_keys() -> None:
    common = vars(BenchSettings())
    print("keys and defaults:", ", ".join(f"{key}={value}" for key, value in common.items()))
    for name in operators.OPERATORS:
        own = {key: value for key, value in vars(operators.load(name).Settings()).items() if key not in common}
        print(f"of {name}:", ", ".join(f"{key}={value}" for key, value in own.items()))


def _exit_on_signal(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
