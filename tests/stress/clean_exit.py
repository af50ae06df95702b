"""Jobs that end: run a short job of two processes again and again, each must leave with exit code 0 and say nothing.

    python -m tests.stress.clean_exit --runs 50

The job ends the way the project's programs do (barrier, collect, destroy the group), then leaves through the interpreter's
ordinary exit with outputs and an autograd graph still alive.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

JOB = """
import gc, os, torch, torch.distributed as dist, fused_ops
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
group = dist.new_group([0, 1])
leaf = torch.full((4, 8), float(rank), requires_grad=True)
held = []
for call in range(20):
    out = fused_ops.all_to_all(leaf, comm="host")
    held.append(fused_ops.all_to_all(out.detach(), group=group, channel=1, comm="host"))
    out.sum().backward()
    dist.all_reduce(leaf.grad)
assert out[0, 0] == 0 and out[-1, 0] == 1
dist.barrier()
gc.collect()
dist.destroy_process_group()
"""


def run_job(timeout_s: float = 180) -> list[str]:
    """What went wrong in one job, by process; empty when both left with 0 and were silent."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "STORE": f"{folder}/store", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOB],
                env={**env, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        problems = []
        for rank, process in enumerate(ranks):
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
                problems.append(f"rank {rank} did not end within {timeout_s:g} s: {said}")
                continue
            if process.returncode != 0 or said:
                problems.append(f"rank {rank}: exit code {process.returncode}, said: {said}")
        return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.clean_exit", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    start, failed = time.monotonic(), 0
    for number in range(runs):
        problems = run_job()
        failed += bool(problems)
        for problem in problems:
            print(f"run {number}: {problem}", flush=True)
    print(f"{runs - failed} of {runs} jobs ended well, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
