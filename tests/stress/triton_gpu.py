"""Random calls of `fused_ops.embedding_all_to_all` in Triton on GPUs, against float64; one line each.

    python -m tests.stress.triton_gpu --ranks 4 --cases 30 --link pinned --delay-us 300

Ranks may share a card (run an MPS daemon then): each takes its share of the SMs. Every case runs twice, and its results must
be equal to the bit; then the failures: a wrong index, a rank that does not come.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist

import fused_ops
from fused_ops.symmetric.group import context, group_name
from tests.fused_ops.embedding_reference import Case
from tests.fused_ops.test_triton_failures import bad_values, disagreements, late_peer, nothing_is_updated, rejections
from tests.fused_ops.triton_ranks import run_case
from tests.ranks import RankError, run_ranks, take_card

FEWEST_RANKS = 3  # of a failure: one at fault, one that notices, one beside them
FAILURES = {
    "bad values": (bad_values,),
    "nothing is updated": (nothing_is_updated,),
    "rejections": (rejections,),
    "disagreements": (disagreements,),
    "late peer, forward": (late_peer, "forward"),
    "late peer, backward": (late_peer, "backward"),
}


def prepare(link: str) -> torch.device:
    device = take_card()
    fused_ops.set_link(link)
    fused_ops.set_timeout(60)
    return device


def random_cases(link: str, seed: int, cases: int, delay_us: int) -> list[str]:
    """One line a case; an AssertionError where one is wrong."""
    device, lines = prepare(link), []
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(seed, seed + cases):
        case = Case.random(number, world)
        start = time.monotonic()
        first = run_case(case, device)
        for channel in context(group_name(None)).channels():
            channel.set_stress_delay(delay_us, number)
        second = run_case(case, device)
        torch.cuda.synchronize()
        fused_ops.check_errors()
        what = f"seed {number:4} {case.layout.dtype} {case.optimizer:15} {case.pooling:4}"
        try:
            case.check(rank, first)
            assert first.equals(second), "the second run differs"
        except AssertionError as error:
            raise AssertionError(f"{what}: {case.layout}\n{error}") from None
        lines.append(f"ok   {what} {time.monotonic() - start:6.2f} s")
    return lines


def failure(link: str, name: str) -> None:
    scenario, *arguments = FAILURES[name]
    scenario(prepare(link), *arguments)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.triton_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--link", choices=["auto", "peer", "pinned"], default="auto")
    parser.add_argument("--delay-us", type=int, default=200, help="longest delay between a slice's data and its flag")
    options = parser.parse_args()
    failed = False
    try:
        arguments = (options.link, options.seed, options.cases, options.delay_us)
        print("\n".join(run_ranks(options.ranks, random_cases, *arguments, timeout=540)[0]), flush=True)
    except RankError as error:
        failed = True
        print(f"FAIL random cases\n{error}", flush=True)
    for name in FAILURES:
        start = time.monotonic()
        try:
            run_ranks(
                max(options.ranks, 3 if "late" in name or name == "disagreements" else 2),
                failure,
                options.link,
                name,
                timeout=120,
            )
            print(f"ok   {name} {time.monotonic() - start:6.2f} s", flush=True)
        except RankError as error:
            failed = True
            print(f"FAIL {name}\n{error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
