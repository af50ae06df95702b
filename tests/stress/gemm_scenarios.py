"""The scenarios of the GEMM operators. Each runs on every rank, checks itself, and returns one line of detail."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from tests.stress.gemm_problems import OPERATORS, Call, Problem
from tests.stress.lab import Lab, memory_bytes
from tests.stress.scenario import Scenario, register_in

SCENARIOS: dict[str, Scenario] = {}
scenario = register_in(SCENARIOS)
POISON = 99
CHANNELS = 3


def comm(lab: Lab) -> str:
    """By name, so that nothing falls back."""
    return lab.backend or lab.comm


def plain(lab: Lab, operator: str, rows: int = 6, columns: int = 40, inner: int = 24) -> Call:
    return Problem(operator, lab.seed, rows, [columns] * lab.world, [inner] * lab.world).on(
        lab.device, lab.rank, lab.world
    )


def check(lab: Lab, outputs: list[Tensor], expected: list[Tensor]) -> None:
    assert len(outputs) == len(expected)
    for output, want in zip(outputs, expected, strict=True):
        lab.check(output, want)


def exchange(lab: Lab, problem: Problem, group: dist.ProcessGroup | None = None, channel: int = 0) -> None:
    """One checked call whose outputs are poisoned afterwards: the slot's next user must overwrite every byte."""
    call = problem.on(lab.device, dist.get_rank(group), dist.get_world_size(group))
    outputs = call.run(group=group, channel=channel, comm=comm(lab))
    check(lab, outputs, call.expected())
    for output in outputs:
        output.fill_(POISON)


def sync_streams(lab: Lab, streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream(lab.device).wait_stream(stream)


@scenario()
def random_shapes(lab: Lab) -> str:
    """All three operators on one channel; now and then an output of two phases."""
    rng = lab.rng("shapes")
    for call in range(lab.calls):
        exchange(lab, Problem.draw(rng, lab.world, large=call % 50 == 10))
    lab.finish()
    return f"{lab.calls} calls of random shapes, dtypes and strides, right to the bit"


@scenario(weight=0.5)
def gradients(lab: Lab) -> str:
    rng = lab.rng("gradients")
    for number in range(lab.calls):
        call = Problem.draw(rng, lab.world, large=number % 50 == 10).on(lab.device, lab.rank, lab.world)
        outputs, found = call.run_with_backward(comm=comm(lab), channel=rng.randrange(CHANNELS))
        check(lab, outputs, call.expected())
        check(lab, found, call.expected_gradients())
    lab.finish()
    return f"{lab.calls} forward and backward passes on {CHANNELS} channels, right to the bit"


@scenario()
def back_to_back(lab: Lab) -> str:
    """No pause between calls, none of which is looked at before the end."""
    calls = [plain(lab, operator) for operator in OPERATORS]
    expected = [call.expected() for call in calls]
    for number in range(lab.calls):
        which = number // 7 % len(calls)
        check(lab, calls[which].run(comm=comm(lab)), expected[which])
    lab.finish()
    return f"{lab.checked} calls without a pause, seven of each operator in turn"


@scenario()
def several_channels(lab: Lab) -> str:
    """Calls take turns on the channels; outputs of all of them are alive at once."""
    rng, held = lab.rng("channels"), []
    for _ in range(lab.calls):
        call = Problem.draw(rng, lab.world).on(lab.device, lab.rank, lab.world)
        held.append((call.run(channel=rng.randrange(CHANNELS), comm=comm(lab)), call.expected()))
        if len(held) > 10:
            check(lab, *held.pop(rng.randrange(len(held))))
    for outputs, expected in held:
        check(lab, outputs, expected)
    lab.finish()
    return f"{lab.calls} calls of all operators, {CHANNELS} channels"


@scenario()
def channels_in_flight(lab: Lab) -> str:
    """Two calls at once: threads on a host, streams on a device."""
    rounds = lab.calls // 2 + 1
    if lab.device.type == "cuda":
        return _on_streams(lab, rounds)
    errors: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            mine = Lab(lab.device, lab.calls, lab.seed, lab.timeout_s, backend=lab.backend)
            rng = lab.rng(lane)
            for _ in range(rounds):
                exchange(mine, Problem.draw(rng, lab.world), channel=lane)
            mine.finish()
        except BaseException as error:
            errors.append(error)

    # Ranks start their lanes in different orders: lanes must be able to come up, and wait, independently.
    threads = [threading.Thread(target=work, args=((lane + lab.rank) % 2,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return f"2 threads with a channel each, {rounds} calls a channel"


def _on_streams(lab: Lab, rounds: int) -> str:
    streams = [torch.cuda.Stream(lab.device) for _ in range(2)]
    rng = lab.rng("streams")
    for _ in range(rounds):
        calls = [Problem.draw(rng, lab.world).on(lab.device, lab.rank, lab.world) for _ in streams]
        expected = [call.expected() for call in calls]
        outputs = []
        for lane, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            stream.wait_stream(torch.cuda.current_stream(lab.device))
            with torch.cuda.stream(stream):
                outputs.append(call.run(channel=lane, comm=comm(lab)))
        sync_streams(lab, streams)
        for found, want in zip(outputs, expected, strict=True):
            check(lab, found, want)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(lab.device))
    lab.finish()
    return f"{rounds} pairs of calls on 2 streams, one channel each"


@scenario(smallest_world=2)
def overlapping_groups(lab: Lab) -> str:
    """The world, all but one rank, one rank, a pair: in random order, each with channels of its own."""
    members = [list(range(lab.world)), list(range(lab.world - 1)), list(range(1, lab.world)), [0, lab.world - 1]]
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    rng = lab.rng("groups")
    for _ in range(lab.calls):
        ranks, group = rng.choice(groups)
        problem, channel = Problem.draw(rng, len(ranks)), rng.randrange(2)
        if lab.rank in ranks:
            exchange(lab, problem, group=group, channel=channel)
    lab.finish()
    return f"{len(groups)} groups, {lab.calls} calls in all"


@scenario()
def held_outputs(lab: Lab) -> str:
    """Every output is kept until 100 later calls have run, then compared; memory must not grow."""
    rng = lab.rng("held")
    held: list[tuple[list[Tensor], list[Tensor]]] = []
    sizes = []
    calls = [Problem.draw(rng, lab.world, operator).on(lab.device, lab.rank, lab.world) for operator in OPERATORS * 2]
    calls += [Problem.draw(rng, lab.world, OPERATORS[0], large=True).on(lab.device, lab.rank, lab.world)]
    expected = [call.expected() for call in calls]
    for number in range(lab.calls):
        which = number % len(calls)
        held.append((calls[which].run(comm=comm(lab)), expected[which]))
        if len(held) > 100:
            check(lab, *held.pop(0))
        sizes.append(memory_bytes())
    for outputs, wanted in held:
        check(lab, outputs, wanted)
    held.clear()
    lab.finish()
    settled = sizes[min(len(sizes) - 1, 150)]
    assert sizes[-1] <= settled, f"shared memory grew from {settled} to {sizes[-1]} bytes"
    return f"{lab.calls} calls' outputs held for 100 calls, {sizes[-1]} bytes of shared memory"


@scenario(weight=0.1)
def delayed_rank(lab: Lab) -> str:
    rng, own = lab.rng("delayed"), lab.rng(f"pauses of {lab.rank}")
    for number in range(lab.calls):
        if number % lab.world == lab.rank:
            lab.pause(own, 0.005)
        exchange(lab, Problem.draw(rng, lab.world, large=number % 10 == 3))
    lab.finish()
    return f"{lab.calls} calls, each rank in turn up to 5 ms late"


@scenario(weight=0.1)
def delayed_flags(lab: Lab) -> str:
    rng = lab.rng("flags")
    for channel in range(CHANNELS):
        check(lab, (call := plain(lab, OPERATORS[channel])).run(channel=channel, comm=comm(lab)), call.expected())
    lab.set_stress_delay(2000)
    for number in range(lab.calls):
        exchange(lab, Problem.draw(rng, lab.world, large=number % 10 == 3), channel=rng.randrange(CHANNELS))
    lab.set_stress_delay(0)
    lab.finish()
    return f"{lab.calls} calls, up to 2 ms between each slice's data and its flag"


@scenario(smallest_world=2, weight=0.3)
def everything_at_once(lab: Lab) -> str:
    """Good calls, rejections and disagreements by changing ranks in random order; ranks pause, flags lag, outputs are held."""
    rng, own, held, spoilt = lab.rng("mixture"), lab.rng(f"pauses of {lab.rank}"), [], 0
    exchange(lab, Problem.draw(rng, lab.world))
    lab.set_stress_delay(300)
    for number in range(1, lab.calls):
        kind, culprit = rng.random(), rng.randrange(lab.world)
        if own.random() < 0.1:
            lab.pause(own, 0.003)
        if kind >= 0.85:
            spoilt += 1
            _spoil(lab, rng, culprit, rejected=kind < 0.93)
            continue
        call = Problem.draw(rng, lab.world, large=number % 40 == 7).on(lab.device, lab.rank, lab.world)
        held.append((call.run(comm=comm(lab)), call.expected()))
        if own.random() < 0.5:
            check(lab, *held.pop(own.randrange(len(held))))
    for outputs, expected in held:
        check(lab, outputs, expected)
    lab.set_stress_delay(0)
    lab.finish()
    return f"{lab.checked} good outputs, {spoilt} calls that one rank spoilt"


def _spoil(lab: Lab, rng: random.Random, culprit: int, rejected: bool) -> None:
    """A call that `culprit` rejects, or in which it disagrees with the others: an error on every rank."""
    operator = getattr(fused_ops, rng.choice(OPERATORS))
    options = {"total_rows": lab.world} if operator is fused_ops.all_gather_gemm else {}
    rows = 1 if options else lab.world
    input, weight = torch.zeros(rows, 3, device=lab.device), torch.zeros(5, 3, device=lab.device)
    error: type[Exception] = ValueError
    if rejected:
        weight = weight[:, :2] if lab.rank == culprit else weight
        error = ValueError if lab.rank == culprit else fused_ops.PeerAbortedError
    elif lab.rank == culprit:
        input, weight = input.bfloat16(), weight.bfloat16()
    lab.fails(error, lambda: operator(input, weight, comm=comm(lab), **options))


@scenario(smallest_world=2, fixed_calls=True)
def stopped_peer(lab: Lab) -> str:
    """The last rank stops (a host process: SIGSTOP; a device rank: makes no call). Everybody else's error names it."""
    waits = [_stop_in(lab, operator) for operator in OPERATORS]
    longest = max(waits)
    return f"rank {lab.world - 1} stopped in each operator: PeerTimeoutError named it after at most {longest:.2f} s"


def _stop_in(lab: Lab, operator: str) -> float:
    group, bound, stopped = dist.new_group(list(range(lab.world))), 1.5, lab.world - 1
    call = plain(lab, operator)

    def issue() -> list[Tensor]:
        return call.run(group=group, comm=comm(lab))

    for _ in range(3):
        check(lab, issue(), call.expected())
    lab.synchronize()
    fused_ops.set_timeout(bound, group)
    pids: list[int] = [0] * lab.world
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    waited = 0.0
    if lab.rank != stopped:
        time.sleep(0.1)
        start = time.monotonic()
        error = lab.fails(fused_ops.PeerTimeoutError, issue)
        waited = time.monotonic() - start
        assert f"[{stopped}]" in str(error), error
        assert operator in str(error), error
        assert bound * 0.9 < waited < bound + 5, f"the bound is {bound} s, the error came after {waited:.2f} s"
        again = lab.fails(fused_ops.CommunicationError, issue)
        assert isinstance(again, fused_ops.PeerTimeoutError), again
        if lab.rank == 0 and lab.device.type == "cpu":
            time.sleep(1.0)  # the others' bounds
            os.kill(pids[stopped], signal.SIGCONT)
    elif lab.device.type == "cpu":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Its own part of the call may have been complete; the next one, at the latest, says that the others gave up.
        lab.fails(fused_ops.PeerAbortedError, lambda: [issue() for _ in range(2)])
    dist.barrier()
    other = plain(lab, operator, rows=9)
    check(lab, other.run(comm=comm(lab)), other.expected())  # other groups go on
    lab.finish()
    return waited


@scenario(devices=("cpu",), smallest_world=2, kills=True, fixed_calls=True)
def killed_peer(lab: Lab) -> str:
    calls, lost = [plain(lab, operator) for operator in OPERATORS], lab.world - 1
    for channel, call in enumerate(calls):
        check(lab, call.run(channel=channel, comm=comm(lab)), call.expected())
    lab.finish()
    dist.barrier()
    if lab.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    longest = 0.0
    for channel, call in enumerate(calls):
        start = time.monotonic()
        kinds = (fused_ops.PeerLostError, fused_ops.PeerAbortedError)
        error = lab.fails(kinds, lambda channel=channel, call=call: call.run(channel=channel, comm=comm(lab)))
        longest = max(longest, time.monotonic() - start)
        assert longest < 5, f"noticed after {longest:.1f} s"
        assert f"rank {lost} has ended" in str(error), error
    return f"rank {lost} killed: each operator named it after at most {longest * 1e3:.0f} ms"


@scenario(devices=("cuda",), fixed_calls=True)
def cuda_graph(lab: Lab) -> str:
    """One call of each operator captured, replayed with inputs changed in place, eager calls in between."""
    replays = 100
    calls = [plain(lab, operator, rows=8) for operator in OPERATORS]
    for call in calls:
        call.run(comm=comm(lab))  # loads and sets up what the first call of a shape does
    lab.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call.run(comm=comm(lab)) for call in calls]
    for replay in range(replays):
        seed = lab.seed + replay
        for call, outputs in zip(calls, captured, strict=True):
            problem = call.problem
            fresh = Problem(problem.operator, seed, problem.rows, problem.columns, problem.inner)
            other = fresh.on(lab.device, lab.rank, lab.world)
            for mine, new in zip(call.leaves, other.leaves, strict=True):
                mine.copy_(new)
            for output in outputs:
                output.fill_(POISON)
        graph.replay()
        for call, outputs in zip(calls, captured, strict=True):
            problem = call.problem
            fresh = Problem(problem.operator, seed, problem.rows, problem.columns, problem.inner)
            check(lab, outputs, fresh.on(lab.device, lab.rank, lab.world).expected())
        if replay % 3 == 0:
            exchange(lab, Problem.draw(lab.rng(replay), lab.world))
    lab.finish()
    return f"{replays} replays of one call of each operator, {lab.checked} outputs right to the bit"
