"""The scenarios of `fused_ops.embedding_all_to_all`. Each runs on every rank, checks itself, and returns one line."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.fused_ops.embedding_reference import Case
from tests.stress.embedding_problems import OPTIMIZERS, Owned, Problem
from tests.stress.lab import Lab
from tests.stress.scenario import Scenario, register_in

SCENARIOS: dict[str, Scenario] = {}
scenario = register_in(SCENARIOS)
ERRORS = (ValueError, fused_ops.CommunicationError)


def comm(lab: Lab) -> str:
    return lab.backend or "fused"


def plain(lab: Lab, optimizer: str = "sgd", rows: int = 5000, batch: int = 256, dims: int = 64) -> Problem:
    """Two tables a rank, fp32, bags of up to nine."""
    layout = EmbeddingLayout.table_wise([[dims, dims]] * lab.world, [batch] * lab.world)
    return Problem(layout, "sum", optimizer, lab.seed + 11, rows, 9, False)


def owned_by_all(lab: Lab, problem: Problem) -> list[Owned]:
    return [problem.owned(rank, lab.device) for rank in range(lab.world)]


def forward_and_backward(lab: Lab, problem: Problem, everyone: list[Owned], channel: int = 0) -> tuple[Tensor, Owned]:
    mine = everyone[lab.rank].copy()
    output = problem.run(mine, comm=comm(lab), channel=channel)
    kept = output.detach().clone()
    output.backward(mine.grad)
    return kept, mine


def check(lab: Lab, problem: Problem, everyone: list[Owned], output: Tensor, mine: Owned) -> None:
    problem.check(output, problem.expected_output(lab.rank, everyone), "output")
    tables, states = problem.expected_update(lab.rank, everyone)
    for t, (got, want) in enumerate(zip(mine.tables, tables, strict=True)):
        problem.check(got, want, f"table {t}")
    for s, (got, want) in enumerate(zip(mine.states, states, strict=True)):
        problem.check(got, want, f"state {s}")
    lab.checked += 1


@scenario(weight=0.03)
def small_shapes(lab: Lab) -> str:
    """Ranks without tables, shared tables, empty batches and bags, plain gradients, weights' gradients, scattered columns."""
    for call in range(lab.calls):
        case = Case.random(lab.seed + call, lab.world)
        case.check(lab.rank, case.run(lab.rank, device=lab.device, comm=comm(lab)).cpu())
        lab.checked += 1
    return f"{lab.checked} random calls equal float64, outputs, gradients, tables and states"


@scenario(weight=0.03)
def large_shapes(lab: Lab) -> str:
    lookups = 0
    for call in range(lab.calls):
        problem = Problem.draw(lab.seed + call, lab.world)
        everyone = owned_by_all(lab, problem)
        check(lab, problem, everyone, *forward_and_backward(lab, problem, everyone))
        lookups += everyone[lab.rank].indices.numel()
    return f"{lab.checked} random calls equal float64, {lookups / 1e6:.1f} M lookups on rank {lab.rank}"


@scenario()
def back_to_back(lab: Lab) -> str:
    """Forward calls without a pause; what comes out of each is the same to the bit."""
    problem = plain(lab, batch=64)
    everyone = owned_by_all(lab, problem)
    mine = everyone[lab.rank]
    with torch.no_grad():
        first = problem.run(mine, comm=comm(lab)).clone()
        problem.check(first, problem.expected_output(lab.rank, everyone), "output")
        wrong = torch.zeros((), dtype=torch.int64, device=lab.device)
        for _ in range(lab.calls):
            wrong += (problem.run(mine, comm=comm(lab)) != first).sum()
    lab.synchronize()
    fused_ops.check_errors()
    assert int(wrong) == 0, f"{int(wrong)} elements differ"
    return f"{lab.calls} forward calls, every output the same to the bit"


@scenario(weight=0.01)
def bitwise_repeat(lab: Lab) -> str:
    """Updates too, hot rows among them, whatever ran in between."""
    for call in range(lab.calls):
        problem = Problem.draw(lab.seed + 1000 + call, lab.world)
        everyone = owned_by_all(lab, problem)
        first, changed = forward_and_backward(lab, problem, everyone)
        other = plain(lab, batch=33)
        forward_and_backward(lab, other, owned_by_all(lab, other))
        again, changed_again = forward_and_backward(lab, problem, everyone)
        assert torch.equal(first, again), f"output differs: {problem}"
        pairs = zip(changed.changed(), changed_again.changed(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"update differs: {problem}"
    return f"{lab.calls} calls repeated to the bit"


@scenario(weight=0.01)
def channels_in_flight(lab: Lab) -> str:
    """Two calls at once, each on its channel (and stream); alternating shapes."""
    problems = [Problem.draw(lab.seed + 2000 + n, lab.world, 1500) for n in range(4)]
    everyone = [owned_by_all(lab, problem) for problem in problems]
    streams = [torch.cuda.Stream(lab.device) for _ in range(2)] if lab.device.type == "cuda" else [None, None]
    lab.synchronize()
    for call in range(lab.calls):
        results = []
        for channel in range(2):
            n = (call + channel) % len(problems)
            with torch.cuda.stream(streams[channel]) if streams[channel] else torch.enable_grad():
                results.append((n, *forward_and_backward(lab, problems[n], everyone[n], channel)))
        lab.synchronize()
        for n, output, mine in results:
            check(lab, problems[n], everyone[n], output, mine)
    return f"{lab.checked} calls, two at a time"


@scenario(smallest_world=2, weight=0.01)
def overlapping_groups(lab: Lab) -> str:
    halves = [list(range(lab.world // 2)), list(range(lab.world // 2, lab.world))]
    groups = [dist.new_group(ranks) for ranks in halves]
    which = int(lab.rank in halves[1])
    inside = halves[which].index(lab.rank)
    for call in range(lab.calls):
        problem = Problem.draw(lab.seed + 3000 + call, len(halves[which]), 800)
        everyone = [problem.owned(rank, lab.device) for rank in range(len(halves[which]))]
        mine = everyone[inside].copy()
        output = problem.run(mine, comm=comm(lab), group=groups[which])
        whole = plain(lab, batch=16)
        forward_and_backward(lab, whole, owned_by_all(lab, whole))
        problem.check(output.detach(), problem.expected_output(inside, everyone), "output in a subgroup")
        output.backward(mine.grad)
        for got, want in zip(mine.tables, problem.expected_update(inside, everyone)[0], strict=True):
            problem.check(got, want, "table in a subgroup")
        lab.checked += 1
    return f"{lab.checked} calls in halves of the world, calls of the world between forward and backward"


@scenario(weight=0.02)
def delayed_flags(lab: Lab) -> str:
    problem = plain(lab)
    everyone = owned_by_all(lab, problem)
    forward_and_backward(lab, problem, everyone)
    lab.set_stress_delay(2000)
    for _ in range(lab.calls):
        check(lab, problem, everyone, *forward_and_backward(lab, problem, everyone))
    lab.set_stress_delay(0)
    return f"{lab.checked} calls, up to 2 ms between each slice's data and its flag"


@scenario(devices=("cuda",), fixed_calls=True)
def bad_index(lab: Lab) -> str:
    """Found in the kernel: named on its rank, heard of on the others, nothing updated by the backward already enqueued."""
    rounds = 5
    for optimizer in OPTIMIZERS:
        for turn in range(rounds):
            problem = plain(lab, optimizer, batch=100)
            mine = problem.owned(lab.rank, lab.device)
            before = [t.clone() for t in mine.changed()]
            culprit = turn % lab.world
            if lab.rank == culprit:
                position = int(mine.offsets[-1]) * (turn + 1) // (rounds + 1)
                mine.indices[position] = problem.rows + turn if turn % 2 else -1 - turn
            lab.synchronize()
            dist.barrier()
            error = lab.fails(ERRORS, lambda p=problem, m=mine: p.run(m, comm=comm(lab)).backward(m.grad))
            message = str(error)
            if lab.rank == culprit:
                assert isinstance(error, ValueError), message
                assert "out of range for table" in message, message
                assert str(problem.rows + turn if turn % 2 else -1 - turn) in message, message
            else:
                assert isinstance(error, fused_ops.PeerAbortedError), message
                assert f"rank {culprit}" in message, message
            pairs = zip(before, mine.changed(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"{optimizer}: updated after the error"
            dist.barrier()
            drain_errors(lab)
            dist.barrier()
            everyone = owned_by_all(lab, problem)
            check(lab, problem, everyone, *forward_and_backward(lab, problem, everyone))
    return f"{rounds * len(OPTIMIZERS)} bad indices named, nothing updated, {lab.checked} good calls between them"


def drain_errors(lab: Lab) -> None:
    """A call that ran into the same failure may have left its own record."""
    lab.synchronize()
    while True:
        try:
            fused_ops.check_errors()
            return
        except ERRORS:
            lab.synchronize()


@scenario(smallest_world=2, fixed_calls=True)
def stopped_peer(lab: Lab) -> str:
    """The last rank makes no call. Everybody else's error names it, and nothing is updated."""
    group, bound, stopped = dist.new_group(list(range(lab.world))), 1.5, lab.world - 1
    problem = plain(lab)
    mine = problem.owned(lab.rank, lab.device)

    def step() -> None:
        problem.run(mine, comm=comm(lab), group=group).backward(mine.grad)

    step()
    lab.synchronize()
    before = [t.clone() for t in mine.changed()]
    fused_ops.set_timeout(bound, group)
    dist.barrier()
    waited = 0.0
    if lab.rank != stopped:
        start = time.monotonic()
        error = lab.fails(fused_ops.PeerTimeoutError, step)
        waited = time.monotonic() - start
        assert f"[{stopped}]" in str(error), error
        assert bound * 0.9 < waited < bound + 5, f"the bound is {bound} s, the error came after {waited:.2f} s"
        assert all(torch.equal(a, b) for a, b in zip(before, mine.changed(), strict=True)), "updated after the time-out"
    dist.barrier()
    again = plain(lab, batch=16)  # other groups go on
    everyone = owned_by_all(lab, again)
    check(lab, again, everyone, *forward_and_backward(lab, again, everyone))
    return f"rank {stopped} made no call: named after {waited:.2f} s (bound {bound} s), nothing updated"


@scenario(devices=("cuda",), fixed_calls=True)
def cuda_graph(lab: Lab) -> str:
    """Forward, backward and update captured together; replays are steps, eager calls go between them."""
    replays = 20
    for optimizer in OPTIMIZERS:
        problem = plain(lab, optimizer)
        everyone = owned_by_all(lab, problem)
        eager, captured = everyone[lab.rank].copy(), everyone[lab.rank].copy()

        rates = {id(owned): problem.optimizer_of(owned) for owned in (eager, captured)}

        def step(owned: Owned, p: Problem = problem, o: dict = rates) -> Tensor:
            output = p.run(owned, o[id(owned)], comm=comm(lab))
            output.backward(owned.grad)
            return output.detach()

        stream = torch.cuda.Stream(lab.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step(captured)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, start in zip(captured.changed(), everyone[lab.rank].changed(), strict=True):
            tensor.copy_(start)
        lab.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step(captured)
        for replay in range(replays):
            for optimizer_of in rates.values():
                optimizer_of.learning_rate = 0.05 / (replay + 1)
            graph.replay()
            wanted = step(eager)
            assert torch.equal(output, wanted), f"{optimizer}: replay {replay} differs from the eager step"
        pairs = zip(captured.changed(), eager.changed(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{optimizer}: states or tables differ after {replays} steps"
        lab.synchronize()
        fused_ops.check_errors()
        dist.barrier()
    return f"{replays} replayed steps of each of {', '.join(OPTIMIZERS)}, equal to the bit to eager ones"


@scenario(fixed_calls=True)
def compiled(lab: Lab) -> str:
    problem = plain(lab, rows=50, batch=32)
    kept = []
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        mine = problem.owned(lab.rank, lab.device)
        optimizer = problem.optimizer_of(mine)

        def several(m: Owned = mine, o: FusedOptimizer = optimizer) -> Tensor:
            outputs = [problem.run(m, o, comm=comm(lab)) for _ in range(5)]
            return torch.stack(outputs).sum(0)

        function = torch.compile(several, backend=backend, fullgraph=True)
        function().backward(mine.grad)
        fused_ops.reset_counters()
        function().backward(mine.grad)
        lab.synchronize()
        calls = {op: n for (op, _, _), n in fused_ops.counters().items() if op.startswith("embedding_all_to_all")}
        assert calls.get("embedding_all_to_all") == 5, f"{backend}: {calls}"
        assert calls.get("embedding_all_to_all_gradient") == 5, f"{backend}: {calls}"
        kept.append(calls)
    return f"5 of 5 identical calls kept by aot_eager and inductor, forward and backward: {kept[-1]}"
