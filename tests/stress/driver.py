"""Runs the stress scenarios of an operator: `python -m tests.stress.<operator>`.

    python -m tests.stress.all_to_all --device cpu --ranks 4 --calls 10000 --out stress.json
    python -m tests.stress.embedding_all_to_all --device cuda --ranks 2 --link pinned --nccl
    torchrun --nproc-per-node 2 -m tests.stress.all_to_all --device cuda     (scenarios that kill a rank are left out)

Every scenario runs in processes of its own, within its own bound; one JSON object each tells how it ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fused_ops
from tests.ranks import RankError, run_ranks
from tests.stress.lab import Lab
from tests.stress.scenario import Scenario


@dataclass(frozen=True)
class Setting:
    operator: str
    device: str
    link: str
    calls: int
    seed: int
    nccl: bool
    backend: str = ""  # "" is the device's native one

    @property
    def scenarios(self) -> dict[str, Scenario]:
        return importlib.import_module(f"tests.stress.{self.operator}_scenarios").SCENARIOS

    def calls_of(self, name: str) -> int:
        return max(1, round(self.calls * self.scenarios[name].weight))

    def bound_s(self, name: str) -> float:
        """Seconds after which the scenario counts as hung: generous for two cores that others use as well."""
        return 120 + 0.05 * self.calls_of(name)


def run_scenario(name: str, setting: Setting) -> str:
    """On one rank, inside its process group."""
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        fused_ops.set_link(setting.link)
        sharing = -(-dist.get_world_size() // torch.cuda.device_count())
        fused_ops.set_num_sms(torch.cuda.get_device_properties(device).multi_processor_count // sharing)
    lab = Lab(device, setting.calls_of(name), setting.seed, setting.bound_s(name) / 4, setting.nccl, setting.backend)
    return setting.scenarios[name].run(lab)


def record(name: str, ranks: int, setting: Setting, seconds: float, ok: bool | None, detail: str) -> dict:
    fields = asdict(setting)
    if setting.device == "cpu":
        fields["link"] = "shared memory"
    calls = None if setting.scenarios[name].fixed_calls else setting.calls_of(name)
    versions = {
        "torch": torch.__version__,
        "fused_ops": fused_ops.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    return {
        "scenario": name,
        "ranks": ranks,
        **fields,
        "calls": calls,
        "seconds": round(seconds, 2),
        "bound_s": setting.bound_s(name),
        "ok": ok,
        "detail": detail,
        "versions": versions,
    }


def chosen(only: list[str], setting: Setting, ranks: int) -> list[str]:
    fitting = [n for n, s in setting.scenarios.items() if setting.device in s.devices and ranks >= s.smallest_world]
    unfit = sorted(set(only) - set(fitting))
    if unfit:
        where = f"{ranks} ranks on {setting.device}"
        sys.exit(f"no such scenario for {where}: {', '.join(unfit)}; there are: {', '.join(fitting)}")
    return only or fitting


def launch(name: str, ranks: int, setting: Setting) -> dict:
    """Run one scenario in fresh processes."""
    start = time.monotonic()
    backend = "cpu:gloo,cuda:nccl" if setting.nccl else "gloo"
    may_die = {ranks - 1} if setting.scenarios[name].kills else set()
    try:
        details = run_ranks(
            ranks, run_scenario, name, setting, timeout=setting.bound_s(name), backend=backend, may_die=may_die
        )
        ok, detail = True, details[0]
    except RankError as error:
        ok, detail = False, str(error)
    return record(name, ranks, setting, time.monotonic() - start, ok, detail)


def join(names: list[str], setting: Setting) -> list[dict]:
    """Run the scenarios on this rank of a job that somebody else launched; returns the records."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if setting.nccl else "gloo")
    records = []
    for name in names:
        if setting.scenarios[name].kills:
            continue
        start = time.monotonic()
        try:
            mine = (True, run_scenario(name, setting))
        except Exception:
            mine = (False, traceback.format_exc())
        answers: list = [None] * dist.get_world_size()
        dist.all_gather_object(answers, mine)
        failed = [f"rank {r} failed:\n{detail}" for r, (ok, detail) in enumerate(answers) if not ok]
        detail = failed[0] if failed else answers[0][1]
        records.append(record(name, len(answers), setting, time.monotonic() - start, not failed, detail))
        if dist.get_rank() == 0:
            report(records[-1])
        if failed:
            break  # ranks are no longer in step on the channels
    dist.barrier()
    dist.destroy_process_group()
    return records


def report(row: dict) -> None:
    print(
        f"{'ok  ' if row['ok'] else 'FAIL'} {row['scenario']:20} {row['seconds']:7.1f} s  {row['detail']}", flush=True
    )


def main(operator: str) -> int:
    parser = argparse.ArgumentParser(prog=f"tests.stress.{operator}", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=10_000, help="of the longest scenarios; slow ones take a share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    parser.add_argument("--link", choices=["auto", "peer", "pinned"], default="auto", help="how GPU ranks reach peers")
    parser.add_argument("--nccl", action="store_true", help="NCCL all-reduces run on a second stream meanwhile")
    parser.add_argument("--backend", default="", help="cuda, triton, ...; default: the device's native one")
    parser.add_argument("--only", nargs="+", default=[], metavar="SCENARIO")
    parser.add_argument("--list", action="store_true", help="name the scenarios and leave")
    options = parser.parse_args()
    if options.nccl and options.device != "cuda":
        parser.error("--nccl needs --device cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    launched = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else options.ranks
    setting = Setting(
        operator, options.device, options.link, options.calls, options.seed, options.nccl, options.backend
    )
    names = chosen(options.only, setting, ranks)
    if options.list:
        print("\n".join(names))
        return 0
    if launched:
        records = join(names, setting)
        is_writer = int(os.environ["RANK"]) == 0
    else:
        records, is_writer = [], True
        for name in names:
            records.append(launch(name, ranks, setting))
            report(records[-1])
    if options.out and is_writer:
        options.out.write_text(json.dumps(records, indent=1) + "\n")
    return 0 if records and all(row["ok"] for row in records) else 1
