"""Run a function on ranks whose Triton kernels are interpreted on the CPU, or compiled for a GPU that the ranks may share."""

import dataclasses
import sys

import pytest
import torch
import torch.distributed as dist

from tests.fused_ops.embedding_reference import Case
from tests.ranks import run_ranks, take_card

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_triton_ranks(world, device, function, *args, timeout=60):
    """`function(device of the rank, *args)` on `world` ranks."""
    env = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    return run_ranks(world, _on_device, device, function, args, timeout=timeout, env=env)


def _on_device(kind, function, args):
    if kind == "cpu":
        forget_triton()
        return function(torch.device("cpu"), *args)
    return function(take_card(), *args)


def forget_triton():
    """Let this rank import Triton anew: the fork server has imported it for compiling, and an import settles that."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


def run_case(case, device, **options):
    """The case's forward and backward on this rank, its result on the CPU."""
    result = case.run(dist.get_rank(options.get("group")), device=device, comm="triton", **options)
    moved = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        moved[field.name] = (
            [v.cpu() for v in value] if isinstance(value, list) else None if value is None else value.cpu()
        )
    return dataclasses.replace(result, **moved)


def small_case(seed, world, most_lookups=60, accept=lambda case: True, **options):
    """The first random case from `seed` on that has lookups, but no more of them than the interpreter gets through soon."""
    for drawn in range(seed, seed + 100_000):
        case = Case.random(drawn, world, **options)
        lookups = [len(rank.indices) for rank in case.ranks]
        if 0 < sum(lookups) <= most_lookups and accept(case):
            return case
    raise AssertionError("no such case")
