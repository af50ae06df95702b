"""The GEMM operators between ranks: bad input and disagreement are errors on all, lost peers are named, groups are apart."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from fused_ops.symmetric.group import context
from tests.fused_ops.gemm_reference import rows_of
from tests.ranks import run_ranks

OPERATORS = (gemm_all_reduce, gemm_reduce_scatter, all_gather_gemm)
TIMEOUT_S = 1.0


def works(**options):
    """A small call of each operator, checked."""
    group = options.get("group")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    input, weight = torch.full((world, 2), 1.0 + rank), torch.ones(3, 2)
    total = world * (world + 1.0)
    assert torch.equal(gemm_all_reduce(input, weight, comm="host", **options), torch.full((world, 3), total))
    assert torch.equal(gemm_reduce_scatter(input, weight, comm="host", **options), torch.full((1, 3), total))
    gathered = all_gather_gemm(input[:1], weight, comm="host", **options)
    assert torch.equal(gathered, 2 * torch.arange(1.0, world + 1).unsqueeze(1).expand(-1, 3))


def bad_inputs(comm):
    x, w = torch.zeros(4, 2), torch.zeros(3, 2)
    cases = [
        ("input must be", (torch.tensor(1.0), w)),
        (r"weight must be \[N, 2\]", (x, torch.zeros(3, 4))),
        (r"weight must be \[N, 2\]", (x, torch.zeros(3))),
        (r"bias must be \[3\], got \(2,\)", (x, w, torch.zeros(2))),
        (r"bias must be \[3\], got \(3, 1\)", (x, w, torch.zeros(3, 1))),
        ("must be one of", (x.double(), w.double())),
        ("must be one of", (x.long(), w)),
        ("they must be equal", (x, w.bfloat16())),
        ("they must be equal", (x.half(), w.half(), torch.zeros(3))),
        ("strided", (torch.eye(2).to_sparse(), w)),
    ]
    for words, arguments in cases:
        for operator in OPERATORS:
            with pytest.raises(ValueError, match=f"{operator.__name__}: .*{words}"):
                operator(*arguments, comm=comm)
    for operator in OPERATORS[1:]:
        with pytest.raises(ValueError, match=r"input must be \[M, K\], got \(2, 2, 2\)"):
            operator(torch.zeros(2, 2, 2), w, comm=comm)
    works()


@pytest.mark.parametrize("comm", ["host", "baseline"])
def test_bad_input_is_one_clear_error(comm):
    run_ranks(2, bad_inputs, comm)


def rejections_and_disagreements():
    rank, world = dist.get_rank(), dist.get_world_size()
    works()
    w = torch.zeros(3, 2)
    for _ in range(70):  # more rejections in a row than the descriptor ring is long
        for operator in OPERATORS:
            with pytest.raises(ValueError if rank == 0 else fused_ops.PeerAbortedError):
                operator(torch.zeros(1, 2 if rank else 3), w, comm="host")
    works()
    zeros = torch.zeros
    disagreements = {
        "rows": (zeros(world * (2 + rank), 2), w),
        "columns": (zeros(world, 2), zeros(3 + rank, 2)),
        "dtypes": (zeros(world, 2).bfloat16(), w.bfloat16()) if rank else (zeros(world, 2), w),
        "bias": (zeros(world, 2), w, zeros(3) if rank else None),
    }
    for arguments in disagreements.values():
        for operator in (gemm_all_reduce, gemm_reduce_scatter):
            operator(zeros(world, 2), w, comm="host")  # known to all, so rank 0 will not look before it sends
            with pytest.raises(ValueError, match="ranks disagree"):
                operator(*arguments, comm="host")
            works()
    for input, total in ((zeros(1, 2 + rank), world), (zeros(1, 2, dtype=torch.half if rank else torch.float), world)):
        all_gather_gemm(zeros(1, 2), w, total_rows=world, comm="host")
        with pytest.raises(ValueError, match="ranks disagree"):
            all_gather_gemm(input, zeros(3, input.shape[1], dtype=input.dtype), total_rows=total, comm="host")
        works()
    for first, second in zip(OPERATORS, (*OPERATORS[1:], OPERATORS[0]), strict=True):
        with pytest.raises(ValueError, match="ranks disagree"):
            (first if rank else second)(zeros(world, 2), w, comm="host")
        works()
    # One rank in the first of two phases, another in a call of one phase.
    with pytest.raises(ValueError, match="ranks disagree"):
        gemm_all_reduce(zeros(1000 if rank else 1, 2), zeros(500, 2), comm="host")
    works()


@pytest.mark.parametrize("world", [2, 3])
def test_rejections_and_disagreements_leave_the_channel_working(world):
    run_ranks(world, rejections_and_disagreements)


def groups_and_channels():
    rank = dist.get_rank()
    pairs = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 2])]
    for _ in range(10):
        works()
        works(channel=5)
        for members, group in zip([(0, 1), (1, 2), (0, 2)], pairs, strict=True):
            if rank in members:
                works(group=group)
                works(group=group, channel=3)


def test_overlapping_groups_and_channels():
    run_ranks(3, groups_and_channels)


def mixed_calls(calls):
    """Calls of all kinds and sizes in random order on one channel, with ranks that dawdle between data and flag."""
    rank, world = dist.get_rank(), dist.get_world_size()
    choices = random.Random(5)
    works()
    for lane in context(dist.group.WORLD.group_name).channels():
        lane.set_stress_delay(1500, rank + 1)
    kept = []
    for number in range(calls):
        rows, columns, inner = choices.choice([0, 1, 2, 7, 500]), choices.choice([1, 5, 600]), choices.choice([0, 1, 9])
        operator = choices.choice(OPERATORS)
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randint(-4, 5, (world, rows, inner), generator=generator).float()
        weights = torch.randint(-4, 5, (world, columns, inner), generator=generator).float()
        if choices.random() < 0.1 and rank == choices.randrange(world):
            time.sleep(0.01)
        mine = rows_of(rows, world, rank)
        if operator is all_gather_gemm:
            result = operator(inputs[0, mine], weights[rank], total_rows=rows, comm="host")
            exact = inputs[0] @ weights[rank].t()
        else:
            result, exact = (
                operator(inputs[rank], weights[rank], comm="host"),
                (inputs @ weights.transpose(1, 2)).sum(0),
            )
            exact = exact if operator is gemm_all_reduce else exact[mine]
        kept.append((result, exact))
    assert all(torch.equal(result, exact) for result, exact in kept)  # whole numbers: exact in any order


@pytest.mark.parametrize("world", [2, 3])
def test_calls_of_all_kinds_on_one_channel(world):
    run_ranks(world, mixed_calls, 300)


def lose_rank_1(how, rows):
    """What ranks 0 and 2 raise; rank 1 takes part in three calls, then dies or sleeps past the bound."""
    rank = dist.get_rank()
    fused_ops.set_timeout(TIMEOUT_S)
    messages = []
    for channel, operator in enumerate(OPERATORS):
        input, weight = torch.ones(rows, 20), torch.ones(300, 20)

        def call(operator=operator, channel=channel, input=input, weight=weight):
            return operator(input, weight, comm="host", channel=channel)

        for _ in range(3):
            call()
        if operator is not OPERATORS[-1]:
            continue
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * TIMEOUT_S)
            return ["late"]
    for channel, operator in enumerate(OPERATORS):
        start = time.monotonic()
        with pytest.raises(fused_ops.CommunicationError) as error:
            operator(torch.ones(rows, 20), torch.ones(300, 20), comm="host", channel=channel)
        assert time.monotonic() - start < TIMEOUT_S + 1.5
        with pytest.raises(type(error.value), match="broken since"):
            operator(torch.ones(rows, 20), torch.ones(300, 20), comm="host", channel=channel)
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return messages


@pytest.mark.parametrize("rows", [3, 900])
def test_a_killed_peer_is_named(rows):
    first, _, last = run_ranks(3, lose_rank_1, "killed", rows, may_die={1}, timeout=30)
    for messages in (first, last):
        for message, operator in zip(messages, OPERATORS, strict=True):
            assert message.startswith("PeerLostError: ")
            assert f"{operator.__name__}: " in message
            assert "the process of rank 1 has ended" in message


@pytest.mark.parametrize("rows", [3, 900])
def test_a_peer_that_does_not_arrive_is_named(rows):
    first, _, last = run_ranks(3, lose_rank_1, "sleeps", rows, timeout=30)
    for messages in (first, last):
        for message in messages:
            assert "PeerTimeoutError: " in message
            assert "ranks that did not arrive: [1]" in message


def exposed_wait():
    """Waiting for a late peer is exposed communication, whether the wait began awake or asleep."""
    rank = dist.get_rank()
    input, weight = torch.ones(4, 2), torch.ones(3, 2)
    gemm_all_reduce(input, weight, comm="host")
    dist.barrier()
    fused_ops.exposed_wait_ms()
    if rank == 1:
        time.sleep(0.2)
    gemm_all_reduce(input, weight, comm="host")
    waited = fused_ops.exposed_wait_ms()
    assert waited > 150 if rank == 0 else waited < 50


def test_waits_are_exposed_communication():
    run_ranks(2, exposed_wait)
