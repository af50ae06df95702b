"""The operators of Mixture of Experts between ranks: bad input and disagreement are errors on all, lost peers are named."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.all_to_all_gemm import all_to_all_gemm
from fused_ops.gemm_all_to_all import gemm_all_to_all
from fused_ops.moe_inputs import check_counts
from fused_ops.symmetric.group import context
from tests.fused_ops.moe_reference import rank_and_world
from tests.ranks import run_ranks

TIMEOUT_S = 1.0


def send_out(input, weight, tokens, counts, **options):
    return all_to_all_gemm(input, weight, tokens, counts, **{"comm": "host", **options})


def send_home(input, weight, received, tokens, counts, gates, num_tokens, **options):
    return gemm_all_to_all(input, weight, received, tokens, counts, gates, num_tokens, **{"comm": "host", **options})


def small_out(world, columns=2, dtype=torch.float32):
    """Arguments of a call in which each rank sends one row to each of two experts a rank."""
    experts = 2 * world
    tokens, counts = torch.zeros(experts, dtype=torch.int64), torch.ones(experts, dtype=torch.int64)
    return {
        "input": torch.ones(1, columns, dtype=dtype),
        "weight": torch.ones(2, 3, columns, dtype=dtype),
        "tokens": tokens,
        "counts": counts,
    }


def small_home(world, columns=2, dtype=torch.float32):
    routing = small_out(world)
    return {
        "input": torch.ones(2 * world, 3, dtype=dtype),
        "weight": torch.ones(2, columns, 3, dtype=dtype),
        "received": torch.ones(2, world, dtype=torch.int64),
        "tokens": routing["tokens"],
        "counts": routing["counts"],
        "gates": torch.ones(2 * world),
        "num_tokens": 1,
    }


CALLS = ((send_out, small_out), (send_home, small_home))


def works(**options):
    """A small call of each operator, checked."""
    rank, world = rank_and_world(options.get("group"))
    arguments = small_out(world)
    arguments["input"] = arguments["input"] * (rank + 1)
    output, dispatched, received = send_out(**arguments, **options)
    assert torch.equal(dispatched[:, 0], torch.arange(1.0, world + 1).repeat(2))
    assert torch.equal(output, 2 * dispatched[:, :1].expand(-1, 3))
    assert received.tolist() == [[1] * world] * 2
    assert send_home(**small_home(world), **options).tolist() == [[6.0 * world] * 2]


def bad_inputs(comm):
    _, world = rank_and_world()
    long = torch.int64
    both = [
        ({"weight": torch.ones(1, 3, 2)}, r"weight must be \[2, N, "),
        ({"weight": torch.ones(3, 2)}, r"weight must be \[2, N, "),
        ({"weight": torch.ones(2, 2, 7)}, r"weight must be \[2, N, "),
        ({"weight": torch.ones(2, 2, 3).half()}, "they must be equal"),
        ({"input": torch.ones(4, 3).double()}, "must be one of"),
        ({"input": torch.ones(4)}, r"input must be \[rows, K\]"),
        ({"input": torch.eye(4).to_sparse()}, "strided"),
        ({"tokens": torch.zeros(4)}, "tokens must be one dimension of torch.int64"),
        ({"tokens": torch.zeros(4, dtype=torch.int32)}, "tokens must be one dimension of torch.int64"),
        ({"tokens": torch.zeros(2, 2, dtype=long)}, "tokens must be one dimension of torch.int64"),
        ({"tokens": torch.tensor([0, 0, 1, 0])}, r"tokens must lie in \[0, 1\), got 0 to 1"),
        ({"tokens": torch.tensor([0, 0, -1, 0])}, r"tokens must lie in \[0, 1\), got -1 to 0"),
        ({"counts": torch.ones(4)}, "counts must be one dimension of torch.int64"),
        ({"counts": torch.ones(3, dtype=long)}, "3 experts .* do not divide over 2 ranks"),
        ({"counts": torch.ones(0, dtype=long)}, "0 experts .* do not divide over 2 ranks"),
        ({"counts": torch.tensor([1, 1, 1, 2])}, "counts sum to 5, but tokens has 4 rows"),
        ({"counts": torch.tensor([3, -1, 1, 1])}, "counts must not be negative"),
    ]
    home = [
        ({"received": torch.ones(2, 1, dtype=long)}, r"received must be \[2, 2\]"),
        ({"received": torch.ones(2, 2)}, r"received must be \[2, 2\]"),
        ({"received": torch.tensor([[1, 1], [1, 2]])}, "received must sum to the input's 4 rows"),
        ({"received": torch.tensor([[3, -1], [1, 1]])}, "received must sum to the input's 4 rows"),
        ({"gates": torch.ones(3)}, r"gates must be \[4\]"),
        ({"gates": torch.ones(4).double()}, r"gates must be \[4\] of torch.float32"),
        ({"num_tokens": -1}, "num_tokens must not be negative"),
    ]
    for call, arguments in CALLS:
        for changes, words in [*both, *(home if call is send_home else [])]:
            name = "gemm_all_to_all" if call is send_home else "all_to_all_gemm"
            with pytest.raises(ValueError, match=f"{name}: .*{words}"):
                call(**{**arguments(world), **changes}, comm=comm)
    with pytest.raises(ValueError, match=r"4 experts .* do not divide over 3 ranks"):
        check_counts("op", torch.ones(4, dtype=long), torch.device("cpu"), 3)
    works(comm=comm)


@pytest.mark.parametrize("comm", ["host", "baseline"])
def test_bad_input_is_one_clear_error(comm):
    run_ranks(2, bad_inputs, comm)


def rejections_and_disagreements():
    rank, world = rank_and_world()
    works()
    for _ in range(70):  # more rejections in a row than the descriptor ring is long
        for call, arguments in CALLS:
            wrong = {"tokens": torch.full((2 * world,), 1)} if rank == 0 else {}
            with pytest.raises(ValueError if rank == 0 else fused_ops.PeerAbortedError):
                call(**{**arguments(world), **wrong})
    works()
    for call, arguments in CALLS:
        for options in ({"columns": 2 + rank}, {"dtype": torch.bfloat16 if rank else torch.float32}):
            call(**arguments(world))  # known to all, so rank 0 will not look before it sends
            with pytest.raises(ValueError, match="ranks disagree"):
                call(**arguments(world, **options))
            works()
        more = arguments(world)
        if rank:  # other numbers of experts
            more["counts"] = torch.cat([more["counts"], torch.zeros(world, dtype=torch.int64)])
            more["weight"] = torch.ones(3, *more["weight"].shape[1:])
            if call is send_home:
                more["received"] = torch.cat([more["received"], torch.zeros(1, world, dtype=torch.int64)])
        with pytest.raises(ValueError, match="ranks disagree"):
            call(**more)
        works()
    for first, second in ((0, 1), (1, 0)):
        call, arguments = CALLS[first if rank else second]
        with pytest.raises(ValueError, match="ranks disagree"):
            call(**arguments(world))
        works()
    # What one rank's experts have is not what another rank sent.
    arguments = small_home(world)
    if rank == 0:
        arguments["received"][0, 1], arguments["input"] = 2, torch.ones(2 * world + 1, 3)
    with pytest.raises(ValueError, match="rank 0 sends 3 rows to rank 1, which expects 2 from it"):
        send_home(**arguments)
    works()
    arguments = small_home(world)
    if rank == 0:
        arguments["received"][0, 1], arguments["received"][1, 1] = 2, 0
    with pytest.raises(ValueError, match="rank 0 sends 2 rows to rank 1, which expects 2 from it, divided otherwise"):
        send_home(**arguments)
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
    """There and back with random routings, on one channel, with ranks that dawdle between data and flag."""
    rank, world = rank_and_world()
    choices = random.Random(5)
    works()
    for lane in context(dist.group.WORLD.group_name).channels():
        lane.set_stress_delay(1500, rank + 1)
    for number in range(calls):
        experts, columns = world * choices.choice([1, 2, 5]), choices.choice([1, 3, 70])
        generator = torch.Generator().manual_seed(number)
        most = choices.choice([0, 1, 4, 60])
        all_counts = torch.randint(0, most + 1, (world, experts), generator=generator)
        if choices.random() < 0.3:
            all_counts[choices.randrange(world)] = 0
        counts = all_counts[rank]
        rows = int(counts.sum())
        tokens = torch.randperm(rows, generator=generator)
        input = torch.randint(-4, 5, (rows, columns), generator=generator).float() + rank
        unit = torch.eye(columns).expand(experts // world, columns, columns)
        if choices.random() < 0.1 and rank == choices.randrange(world):
            time.sleep(0.01)
        output, dispatched, received = send_out(input, unit, tokens, counts)
        assert torch.equal(output, dispatched)
        home = send_home(output, 2 * unit, received, tokens, counts, torch.full((rows,), 0.5), rows)
        assert torch.equal(home, input)
        del output, dispatched, home
    assert sum(row["bytes"] for row in fused_ops.memory_report()) < 2 << 20  # it does not grow with the routings


@pytest.mark.parametrize("world", [2, 3])
def test_random_routings_on_one_channel(world):
    run_ranks(world, mixed_calls, 100)


def lose_rank_1(how, when):
    """What ranks 0 and 2 raise; rank 1 takes part in three calls, then dies or sleeps past the bound: before the next call, or
    in it, when it has said how many rows it will send."""
    rank, world = rank_and_world()
    fused_ops.set_timeout(TIMEOUT_S)
    for channel, (call, arguments) in enumerate(CALLS):
        for _ in range(3):
            call(**arguments(world), channel=channel)
    if rank == 1:
        if when == "halfway":
            group = dist.group.WORLD.group_name
            counts = small_out(world)["counts"]
            torch.ops.fused_ops.all_to_all_gemm_counts(counts, counts.device, group, 0, "host", False)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * TIMEOUT_S)
        return ["late"]
    messages = []
    for channel, (call, arguments) in enumerate(CALLS):
        start = time.monotonic()
        with pytest.raises(fused_ops.CommunicationError) as error:
            call(**arguments(world), channel=channel)
        assert time.monotonic() - start < TIMEOUT_S + 1.5
        with pytest.raises(type(error.value), match="broken since"):
            call(**arguments(world), channel=channel)
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return messages


@pytest.mark.parametrize("when", ["before", "halfway"])
def test_a_killed_peer_is_named(when):
    first, _, last = run_ranks(3, lose_rank_1, "killed", when, may_die={1}, timeout=30)
    for messages in (first, last):
        for message, operator in zip(messages, ("all_to_all_gemm", "gemm_all_to_all"), strict=True):
            assert f"{operator}: " in message
            assert "the process of rank 1 has ended" in message


@pytest.mark.parametrize("when", ["before", "halfway"])
def test_a_peer_that_does_not_arrive_is_named(when):
    first, _, last = run_ranks(3, lose_rank_1, "sleeps", when, timeout=30)
    for messages in (first, last):
        for message in messages:
            assert "PeerTimeoutError: " in message
            assert "ranks that did not arrive: [1]" in message
