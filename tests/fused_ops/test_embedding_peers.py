"""A peer that dies or stops inside `embedding_all_to_all`: an error that names it, within the bound, and nothing updated."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.ranks import run_ranks

TIMEOUT_S = 1.0


def _lose_rank_1(backend, phase, how):
    """What ranks 0 and 2 raise; rank 1 takes part in three whole steps, then dies (or sleeps past the bound)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fused_ops.set_timeout(TIMEOUT_S)
    layout = EmbeddingLayout.table_wise([[16]] * world, [8] * world)
    generator = torch.Generator().manual_seed(rank)
    table = torch.randn(50, 16, generator=generator)
    states = FusedOptimizer.make_states("adagrad", [table])
    optimizer = FusedOptimizer("adagrad", 0.1, states=states)
    indices = torch.randint(0, 50, (2 * layout.global_batch,), generator=generator)
    arguments = ([table], indices, torch.arange(layout.global_batch + 1) * 2, layout)

    def forward():
        return fused_ops.embedding_all_to_all(*arguments, optimizer=optimizer, comm=backend)

    for _ in range(3):
        forward().sum().backward()
    before = [table.clone(), states[0].clone()]
    output = forward() if phase == "backward" else None
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * TIMEOUT_S)
        return "late"
    start = time.monotonic()
    with pytest.raises(fused_ops.CommunicationError) as error:
        (forward() if output is None else output).sum().backward()
    assert time.monotonic() - start < TIMEOUT_S + 1.5
    assert torch.equal(table, before[0])
    assert torch.equal(states[0], before[1])
    with pytest.raises(type(error.value), match="broken since"):
        forward()
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["host", "unfused"])
def test_a_killed_peer_is_named(backend, phase):
    first, _, last = run_ranks(3, _lose_rank_1, backend, phase, "killed", may_die={1}, timeout=20)
    for message in (first, last):
        assert message.startswith("PeerLostError: ")
        assert "the process of rank 1 has ended" in message
        assert ("embedding_all_to_all backward: " in message) == (phase == "backward" and backend == "host")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_peer_that_does_not_come_is_named(phase):
    first, late, last = run_ranks(3, _lose_rank_1, "host", phase, "late", timeout=20)
    assert late == "late"
    for message in (first, last):
        assert message.startswith("PeerTimeoutError: ")
        assert "waited 1 s; ranks that did not arrive: [1]" in message
