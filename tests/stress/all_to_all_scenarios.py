"""The scenarios of the stress test. Each runs on every rank, checks itself, and returns one line of detail."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import fused_ops
from tests.stress.lab import Lab, Layout, content, memory_bytes
from tests.stress.scenario import Scenario, register_in

SCENARIOS: dict[str, Scenario] = {}
scenario = register_in(SCENARIOS)


@scenario()
def back_to_back(lab: Lab) -> str:
    layout = Layout.plain(lab.world, 16)
    for call in range(lab.calls):
        lab.exchange(layout, call)
    lab.finish()
    return f"{lab.checked} calls of one shape, no pause between them"


@scenario()
def random_sizes(lab: Lab) -> str:
    rng, bytes_moved = lab.rng("sizes"), 0
    for call in range(lab.calls):
        huge = call % 500 == 499 or call == 10
        layout = Layout.draw(rng, lab.world, largest_elements=4_000_000 if huge else 2000)
        lab.exchange(layout, call)
        bytes_moved += sum(layout.table[lab.rank]) * torch.Size(layout.trailing).numel() * layout.dtype.itemsize
    lab.finish()
    return f"{lab.checked} calls, {bytes_moved / 1e6:.0f} MB sent by rank {lab.rank}"


@scenario()
def channels_in_flight(lab: Lab) -> str:
    """Three lanes at once: threads on a host, streams on a device."""
    if lab.device.type == "cuda":
        streams = [torch.cuda.Stream(lab.device) for _ in range(3)]
        rng = lab.rng("lanes")
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(lab.device))
        pending = []
        for call in range(lab.calls):
            lane = call % 3
            with torch.cuda.stream(streams[lane]):
                _, output, expected = lab.send(Layout.draw(rng, lab.world), call, channel=lane)
            pending.append((lane, output, expected))
            if lane == 2:
                for number, output, expected in pending:
                    torch.cuda.current_stream(lab.device).wait_stream(streams[number])
                    output.record_stream(torch.cuda.current_stream(lab.device))
                    lab.check(output, expected)
                pending.clear()
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream(lab.device))
        lab.finish()
        return f"{lab.checked} calls on 3 streams, one channel each"
    errors: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            mine = Lab(lab.device, lab.calls, lab.seed, lab.timeout_s)
            rng = lab.rng(lane)
            for call in range(lab.calls // 3 + 1):
                mine.exchange(Layout.draw(rng, lab.world), call, channel=lane)
            mine.finish()
        except BaseException as error:
            errors.append(error)

    # Ranks start their lanes in different orders: lanes must be able to come up, and wait, independently.
    threads = [threading.Thread(target=work, args=((lane + lab.rank) % 3,)) for lane in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return f"3 threads with a channel each, {lab.calls // 3 + 1} calls a channel"


@scenario(smallest_world=2)
def overlapping_groups(lab: Lab) -> str:
    members = [list(range(lab.world)), list(range(lab.world - 1)), list(range(1, lab.world)), [0, lab.world - 1]]
    groups = [(m, dist.new_group(m)) for m in members]
    rng = lab.rng("groups")
    for call in range(lab.calls):
        number = rng.randrange(len(groups))
        ranks, group = groups[number]
        layout = Layout.draw(rng, len(ranks))
        if lab.rank in ranks:
            lab.exchange(layout, call, group=group, channel=rng.randrange(2) if number == 0 else 0)
        elif number == 0:
            rng.randrange(2)
    lab.finish()
    return f"{len(groups)} groups, {lab.checked} calls of rank {lab.rank}"


@scenario()
def held_outputs(lab: Lab) -> str:
    """Every output is kept until 100 later calls have run, then compared bit for bit; memory must not grow."""
    rng, held, sizes = lab.rng("held"), [], []
    layouts = [Layout.draw(rng, lab.world) for _ in range(6)]
    for call in range(lab.calls):
        _, output, expected = lab.send(layouts[call % 6], call)
        held.append((output, expected))
        if len(held) > 100:
            lab.check(*held.pop(0))
        sizes.append(memory_bytes())
    for output, expected in held:
        lab.check(output, expected)
    held.clear()
    del output
    lab.finish()
    settled = sizes[min(len(sizes) // 2, 220)]
    assert sizes[-1] <= settled, f"shared memory grew from {settled} to {sizes[-1]} bytes"
    return f"{lab.checked} outputs held for 100 calls, {sizes[-1]} bytes of shared memory"


@scenario(weight=0.1)
def delayed_rank(lab: Lab) -> str:
    layouts = [Layout.draw(lab.rng("delayed"), lab.world) for _ in range(8)]
    own = lab.rng(f"pauses of {lab.rank}")
    for call in range(lab.calls):
        if call % lab.world == lab.rank:
            lab.pause(own, 0.005)
        lab.exchange(layouts[call % 8], call)
    lab.finish()
    return f"{lab.checked} calls, each rank in turn up to 5 ms late"


@scenario(weight=0.1)
def delayed_flags(lab: Lab) -> str:
    rng = lab.rng("flags")
    lab.exchange(Layout.plain(lab.world, 4), 0)
    lab.set_stress_delay(2000)
    for call in range(1, lab.calls):
        lab.exchange(Layout.draw(rng, lab.world), call)
    lab.finish()
    lab.set_stress_delay(0)
    return f"{lab.checked} calls, up to 2 ms between each slice's data and its flag"


@scenario(weight=0.3)
def gradient(lab: Lab) -> str:
    rng = lab.rng("gradient")
    for call in range(lab.calls):
        layout = Layout.draw(rng, lab.world)
        layout.dtype = rng.choice([torch.float32, torch.bfloat16])
        input, output, expected = lab.send(layout, call, requires_grad=True)
        lab.check(output.detach(), expected)
        shape = lambda rows, layout=layout: (rows, *layout.trailing)  # noqa: E731
        rows_in = [layout.table[s][lab.rank] for s in range(lab.world)]
        rows_out = layout.table[lab.rank]
        # The gradient that rank t gives to what came from s follows the rule too, so its way back can be predicted.
        given = [content(lab.rank, s, ~call, shape(rows_in[s]), layout.dtype, lab.device) for s in range(lab.world)]
        output.backward(torch.cat(given))
        back = [content(t, lab.rank, ~call, shape(rows_out[t]), layout.dtype, lab.device) for t in range(lab.world)]
        assert input.grad is not None
        lab.check(input.grad, torch.cat(back))
    lab.finish()
    return f"{lab.checked // 2} forward and backward passes"


@scenario(smallest_world=2, weight=0.05)
def rejected_input(lab: Lab) -> str:
    layout = Layout.plain(lab.world, 3)
    rejections = max(5, lab.calls // 5)
    for turn in range(rejections):
        for call in range(4):
            lab.exchange(layout, turn * 4 + call)
        bad = turn % lab.world
        rows = lab.world * 3 + (1 if lab.rank == bad else 0)
        kind = ValueError if lab.rank == bad else fused_ops.PeerAbortedError
        input = torch.zeros(rows, 4, device=lab.device)
        error = lab.fails(kind, functools.partial(fused_ops.all_to_all, input, comm=lab.comm))
        assert "divide evenly" in str(error), error
        assert lab.rank == bad or f"rank {bad} rejected" in str(error), error
    lab.finish()
    return f"{rejections} rejected calls, {lab.checked} good ones between them"


@scenario(smallest_world=2, weight=0.05)
def disagreeing_ranks(lab: Lab) -> str:
    odd, world = lab.world - 1, lab.world
    layout = Layout.plain(world, 3)
    zeros = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=lab.device)  # noqa: E731
    for call in range(3):
        lab.exchange(layout, call)  # known to all, so that in the first disagreement only the odd rank looks first
    turns = max(2, lab.calls // 20)
    for turn in range(turns):
        is_odd = lab.rank == odd
        cases: dict[str, dict[str, Any]] = {
            "trailing shape": {"input": zeros(3 * world, 5 + turn if is_odd else 4)},
            "dtype": {"input": zeros(3 * world, 4, dtype=torch.float64 if is_odd else torch.float32)},
            "rows": {"input": zeros((4 + turn if is_odd else 3) * world, 4)},
            "splits": {
                "input": zeros(3 * world, 4),
                "input_splits": [3] * world,
                "output_splits": [4 if is_odd else 3] * world,
            },
        }
        for name, arguments in cases.items():
            error = lab.fails(ValueError, functools.partial(fused_ops.all_to_all, **arguments, comm=lab.comm))
            assert re.search("disagree|which expects", str(error)), f"{name}: {error}"
            lab.exchange(layout, turn)
    lab.finish()
    return f"{turns * 4} disagreements on shape, dtype and splits, {lab.checked} good calls between them"


@scenario(smallest_world=2, weight=0.3)
def everything_at_once(lab: Lab) -> str:
    """Good calls, rejections and disagreements by changing ranks in random order; ranks pause, flags lag, outputs are held."""
    rng, own, held, spoilt = lab.rng("mixture"), lab.rng(f"pauses of {lab.rank}"), [], 0
    known = [Layout.draw(rng, lab.world) for _ in range(4)]
    lab.exchange(known[0], 0)
    lab.set_stress_delay(300)
    for call in range(1, lab.calls):
        kind, culprit = rng.random(), rng.randrange(lab.world)
        if own.random() < 0.1:
            lab.pause(own, 0.003)
        if kind < 0.85:
            layout = rng.choice(known) if rng.random() < 0.7 else Layout.draw(rng, lab.world)
            _, output, expected = lab.send(layout, call)
            held.append((output, expected))
            if own.random() < 0.5:
                lab.check(*held.pop(own.randrange(len(held))))
            continue
        spoilt += 1
        rows = rng.choice([1, 2])
        if kind < 0.93:
            input = torch.zeros(rows * lab.world + (lab.rank == culprit), 3, device=lab.device)
            error = ValueError if lab.rank == culprit or lab.world == 1 else fused_ops.PeerAbortedError
        else:
            input = torch.zeros(rows * lab.world, 4 if lab.rank == culprit else 3, device=lab.device)
            error = ValueError
        lab.fails(error, functools.partial(fused_ops.all_to_all, input, comm=lab.comm))
    for output, expected in held:
        lab.check(output, expected)
    lab.set_stress_delay(0)
    lab.finish()
    return f"{lab.checked} good calls, {spoilt} that one rank spoilt"


@scenario(smallest_world=2, fixed_calls=True)
def stopped_peer(lab: Lab) -> str:
    """The last rank stops (a host process: SIGSTOP; a device rank: makes no call). Everybody else's error names it."""
    group, bound, stopped = dist.new_group(list(range(lab.world))), 1.5, lab.world - 1
    layout = Layout.plain(lab.world, 3)
    for call in range(3):
        lab.exchange(layout, call, group=group)
    lab.synchronize()
    fused_ops.set_timeout(bound, group)
    pids: list[int] = [0] * lab.world
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    waited = 0.0
    if lab.rank != stopped:
        time.sleep(0.1)
        start = time.monotonic()
        error = lab.fails(fused_ops.PeerTimeoutError, lambda: lab.send(layout, 3, group=group))
        waited = time.monotonic() - start
        assert f"[{stopped}]" in str(error), error
        assert bound * 0.9 < waited < bound + 5, f"the bound is {bound} s, the error came after {waited:.2f} s"
        again = lab.fails(fused_ops.CommunicationError, lambda: lab.send(layout, 4, group=group))
        assert isinstance(again, fused_ops.PeerTimeoutError), again
        if lab.rank == 0 and lab.device.type == "cpu":
            time.sleep(1.0)  # the others' bounds
            os.kill(pids[stopped], signal.SIGCONT)
    elif lab.device.type == "cpu":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Its own part of the call may have been complete; the next one, at the latest, says that the others gave up.
        lab.fails(fused_ops.PeerAbortedError, lambda: [lab.send(layout, call, group=group) for call in (3, 4)])
    dist.barrier()
    lab.exchange(layout, 5)  # other groups go on
    lab.finish()
    return f"rank {stopped} stopped: PeerTimeoutError named it after {waited:.2f} s (bound {bound} s)"


@scenario(devices=("cpu",), smallest_world=2, kills=True, fixed_calls=True)
def killed_peer(lab: Lab) -> str:
    layout, lost = Layout.plain(lab.world, 3), lab.world - 1
    for call in range(3):
        lab.exchange(layout, call)
    lab.finish()
    dist.barrier()
    if lab.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = lab.fails((fused_ops.PeerLostError, fused_ops.PeerAbortedError), lambda: lab.send(layout, 3))
    waited = time.monotonic() - start
    assert waited < 5, f"noticed after {waited:.1f} s"
    assert f"rank {lost} has ended" in str(error), error
    return f"rank {lost} killed: {type(error).__name__} named it after {waited * 1e3:.0f} ms"


@scenario(devices=("cuda",), fixed_calls=True)
def cuda_graph(lab: Lab) -> str:
    """Three exchanges captured, replayed 200 times with inputs changed in place, eager calls in between."""
    layouts = [Layout.plain(lab.world, rows, width) for rows, width in [(64, 8), (1000, 3), (7, 1)]]
    inputs = [lab.send(layout, number)[0] for number, layout in enumerate(layouts)]  # a warm-up call of each shape
    lab.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [fused_ops.all_to_all(input, comm=lab.comm) for input in inputs]
    for replay in range(200):
        wanted = []
        for layout, input in zip(layouts, inputs, strict=True):
            shape = (layout.table[0][0], *layout.trailing)
            pieces = [content(lab.rank, d, replay, shape, layout.dtype, lab.device) for d in range(lab.world)]
            input.copy_(torch.cat(pieces))
            wanted.append([content(s, lab.rank, replay, shape, layout.dtype, lab.device) for s in range(lab.world)])
        graph.replay()
        for output, want in zip(outputs, wanted, strict=True):
            lab.check(output, torch.cat(want))
            output.fill_(99)
        if replay % 3 == 0:
            lab.exchange(layouts[replay % len(layouts)], 10_000 + replay)
    lab.finish()
    return f"200 replays of 3 captured exchanges, {lab.checked - 600} eager calls between them"


@scenario(fixed_calls=True)
def compiled(lab: Lab) -> str:
    """Five identical calls in a compiled function, whose results are partly unused, all run, in order, with a gradient."""
    layout = Layout.plain(lab.world, 6)
    source, _, expected = lab.send(layout, 0)
    compilers = ["aot_eager"] if lab.device.type == "cpu" else ["aot_eager", "inductor"]

    def five_calls(input: torch.Tensor) -> torch.Tensor:
        outputs = [fused_ops.all_to_all(input, comm=lab.comm) for _ in range(5)]
        return outputs[0] + outputs[4]

    for compiler in compilers:
        torch._dynamo.reset()
        function = torch.compile(five_calls, backend=compiler, fullgraph=True)
        for with_gradient in (False, True):
            input = source.detach().clone().requires_grad_(with_gradient)
            before = sum(fused_ops.counters().values())
            output = function(input)
            ran = sum(fused_ops.counters().values()) - before
            assert ran == 5, f"{compiler}: {ran} of 5 identical calls ran"
            lab.check(output.detach(), 2 * expected)
            if with_gradient:
                output.backward(torch.ones_like(output))
                lab.check(input.grad, torch.full_like(input, 2.0))
    lab.finish()
    return f"5 of 5 identical calls kept by {' and '.join(compilers)}, forward and backward"
