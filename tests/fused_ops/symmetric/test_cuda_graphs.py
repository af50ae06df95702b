"""Slots of captured calls on a GPU: shared by the calls of one graph, free again once the graph is gone."""

import time

import pytest
import torch

import fused_ops
from fused_ops.symmetric.cuda_channel import cuda_channel
from fused_ops.symmetric.group import context, group_name
from tests.ranks import run_ranks, take_card

pytestmark = pytest.mark.gpu
CALLS = 12  # more than an arena has slots of this size


def capture_and_forget():
    device = take_card()
    fused_ops.set_link("peer")
    fused_ops.set_timeout(30)
    data = torch.randn(2, 1 << 22, device=device)
    expected = fused_ops.all_to_all(data, comm="cuda").clone()
    slots = cuda_channel(context(group_name(None)), 0, device).arenas.newest.slots
    assert len(slots) < CALLS
    held = torch.zeros_like(expected)
    torch.cuda.synchronize()
    for _ in range(CALLS):  # graphs one after another: none may use slots up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                held.copy_(fused_ops.all_to_all(data, comm="cuda"))
        assert sum(slot.capture is not None and not slot.is_free() for slot in slots) == 1
        held.zero_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(held, expected, rtol=0, atol=0)
        del graph
        deadline = time.monotonic() + 10
        while not all(slot.is_free() for slot in slots[1:] if not slot.posted):
            assert time.monotonic() < deadline, "the graph is gone and its slot is not free"
            time.sleep(0.01)
    fused_ops.check_errors()


def test_captured_calls_share_a_slot_that_comes_free_with_their_graph():
    run_ranks(2, capture_and_forget, timeout=120)
