"""Slots in use: outputs held, staged, saved by autograd, alive when the process ends; credits that were withdrawn."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops.symmetric import slots
from tests.ranks import run_ranks

POISON = -12345.0


def even(call: int, rows: int = 3, width: int = 5, group=None, **options) -> torch.Tensor:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    target = torch.arange(world).repeat_interleave(rows)
    input = (call * 1000 + rank * 100 + target * 10).float()[:, None].expand(-1, width)
    return fused_ops.all_to_all(input, group=group, comm="host", **options)


def even_expected(call: int, rows: int = 3, width: int = 5) -> torch.Tensor:
    source = torch.arange(dist.get_world_size()).repeat_interleave(rows)
    return (call * 1000 + source * 100 + dist.get_rank() * 10).float()[:, None].expand(-1, width)


def channel_of(group=None, index: int = 0):
    from fused_ops.symmetric.group import context, group_name

    return context(group_name(group))._channels["host", index]


def held_outputs():
    held = [even(call) for call in range(3 * slots.MOST_SLOTS)]  # far more than slots: the rest are copies
    for call, output in enumerate(held):
        assert torch.equal(output, even_expected(call)), call
        output.fill_(POISON)
    bytes_held = channel_of().bytes
    del held, output
    for call in range(300):
        output = even(call)
        assert torch.equal(output, even_expected(call)), call
        output.fill_(POISON)
    assert channel_of().bytes == bytes_held


def test_held_outputs_keep_their_values_and_memory_stays_bounded():
    run_ranks(2, held_outputs)


def steady_memory():
    generator = torch.Generator().manual_seed(1)
    for call in range(50):
        even(call, rows=int(torch.randint(0, 4000, (), generator=generator)), width=8)
    before = channel_of().bytes
    for call in range(300):
        even(call, rows=int(torch.randint(0, 4000, (), generator=generator)), width=8)
    assert channel_of().bytes <= before + (1 << 20)
    assert len(channel_of().slots._slots) < 12
    assert len(channel_of()._followed_by) <= 1024


def test_random_sizes_settle_on_a_few_slots():
    run_ranks(2, steady_memory)


def exhausted_budget():
    even(0)
    channel_of().slots.budget = 1 << 18
    held = []
    for call in range(40):
        held.append((call, even(call)))
        if call % 7 == 6:
            held.clear()
        for number, output in held:
            assert torch.equal(output, even_expected(number)), (call, number)
    big = [even(call, rows=5000) for call in range(4)]  # larger than the whole budget: staged and copied
    for call, output in enumerate(big):
        assert torch.equal(output, even_expected(call, rows=5000))


def test_past_the_budget_outputs_are_staged_and_copied():
    run_ranks(2, exhausted_budget)


def changing_predictions():
    """Layouts in an order that defeats every prediction, one rank always late, so that withdrawn credits are seen."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    for call in range(400):
        table = torch.randint(0, 3, (world, world), generator=generator).tolist()
        input = torch.cat([torch.full((table[rank][t], 2), call * 100.0 + rank * 10 + t) for t in range(world)])
        if rank == call % world:
            time.sleep(0.0005)
        output = fused_ops.all_to_all(
            input, input_splits=table[rank], output_splits=[table[s][rank] for s in range(world)], comm="host"
        )
        want = torch.cat([torch.full((table[s][rank], 2), call * 100.0 + s * 10 + rank) for s in range(world)])
        assert torch.equal(output, want), call
        output.fill_(POISON)


@pytest.mark.parametrize("world", [2, 3])
def test_layouts_that_defeat_prediction(world):
    run_ranks(world, changing_predictions)


def late_store_on_a_withdrawn_credit():
    """Rank 0 rejects the very call whose credit it had posted ahead. Rank 2 may store on that credit all the same, and
    late: nothing of the next call may lie there."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2])
    for call in range(4):
        even(call, group=group)
    if rank == 0:
        posted = channel_of(group)._posted_ahead
        assert posted is not None
        slot = posted[3]
        with pytest.raises(ValueError, match="divide evenly"):
            fused_ops.all_to_all(torch.zeros(4), group=group, comm="host")
        lane = channel_of(group)
        lane._claim(6, 1, lane_incoming())
        assert slot.quarantined_call == 5  # until every peer has passed the call it was posted for
        assert not lane.slots._is_free(slot)
    dist.barrier()


def lane_incoming():
    from fused_ops.symmetric.host_channel import Incoming

    return Incoming.packed([8, 8, 8])


def test_a_withdrawn_credit_keeps_its_slot_out_of_use_until_peers_have_passed_it():
    run_ranks(3, late_store_on_a_withdrawn_credit)


def one_tag_for_two_layouts():
    even(0)
    even(1)
    even(2)
    lane = channel_of()
    call, tag, _, slot = lane._posted_ahead
    lane._posted_ahead = (call, tag, lane_incoming(), slot)
    with pytest.raises(fused_ops.CommunicationError, match="one tag"):
        even(3)


def test_two_layouts_with_one_tag_are_an_error_not_a_wrong_result():
    run_ranks(1, one_tag_for_two_layouts)


def saved_by_autograd():
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    leaves = [torch.full((world, 4), float(n + 1 + rank), requires_grad=True) for n in range(20)]
    for leaf in leaves:
        output = fused_ops.all_to_all(leaf, comm="host")
        losses.append((output * output).sum())  # autograd saves the output
        del output
    for call in range(100):
        even(call).fill_(POISON)
    for leaf, loss in zip(leaves, losses, strict=True):
        loss.backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())


def test_outputs_saved_by_autograd_are_not_overwritten():
    run_ranks(2, saved_by_autograd)


def freed_in_threads():
    stop, queue, lock = threading.Event(), [], threading.Lock()

    def free():
        while not stop.is_set():
            with lock:
                if queue:
                    queue.pop()
            gc.collect(0)
            time.sleep(0.0005)

    thread = threading.Thread(target=free)
    thread.start()
    for call in range(300):
        output = even(call)
        cycle = [output]
        cycle.append(cycle)
        with lock:
            queue.append(cycle)
        assert torch.equal(output, even_expected(call))
        del output, cycle
    stop.set()
    thread.join()


def test_outputs_freed_by_other_threads_and_by_the_cycle_collector():
    run_ranks(2, freed_in_threads)


def delayed_flags():
    even(0)
    channel_of().set_stress_delay(2000, seed=dist.get_rank())
    for call in range(60):
        output = even(call)
        assert torch.equal(output, even_expected(call))
        output.fill_(POISON)


def test_flags_that_come_long_after_their_data():
    run_ranks(2, delayed_flags)


def crowded():
    for call in range(60):
        assert torch.equal(even(call), even_expected(call))


def test_eight_ranks_on_fewer_cores():
    run_ranks(8, crowded, timeout=90)


EXIT_WITH_LIVE_TENSORS = """
    import torch, torch.distributed as dist, fused_ops, threading
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leaf = torch.ones(4, 2, requires_grad=True)
    kept = fused_ops.all_to_all(leaf, comm="host")
    loss = (kept * kept).sum()
    cycle = [kept]; cycle.append(cycle)
    import builtins; builtins.kept_for_ever = (kept, loss, cycle)
    if {destroy}:
        dist.destroy_process_group()
        assert kept.sum() == 8
    print("done")
"""


@pytest.mark.parametrize("destroy", [True, False])
def test_a_process_that_ends_with_outputs_alive_ends_well(destroy):
    program = textwrap.dedent(EXIT_WITH_LIVE_TENSORS.format(destroy=destroy))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr == ""


def used_after_destroy():
    group = dist.new_group([0, 1])
    kept = even(1, group=group)
    name = group.group_name
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not any(row["group"] == name for row in fused_ops.memory_report())
    for call in range(10):
        even(call).fill_(POISON)
    assert torch.equal(kept, even_expected(1))
    with pytest.raises(ValueError, match="no process group named"):
        fused_ops.all_to_all(torch.zeros(2), group=name, comm="host")


def test_outputs_outlive_their_group():
    run_ranks(2, used_after_destroy)
