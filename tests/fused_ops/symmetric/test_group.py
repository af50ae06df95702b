"""Group contexts: names, re-creation, release of what they hold, set-up that is bounded."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from tests.ranks import run_ranks


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:fused_ops" in line for line in file)


def exchange(group=None, value: float = 1.0) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    output = fused_ops.all_to_all(torch.full((world,), value + rank), group=group, comm="host")
    assert output.tolist() == [value + source for source in range(world)]


def recreated_groups():
    exchange()
    files = maps = None
    for number in range(12):
        group = dist.new_group([0, 1])
        for _ in range(3):
            exchange(group, value=number)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if number == 1:
            files, maps = open_files(), mappings()
    assert open_files() <= files, "file descriptors leak"
    assert mappings() <= maps, "mappings leak"
    assert len(fused_ops.memory_report()) == 1


def test_destroyed_groups_leave_no_files_and_no_mappings():
    run_ranks(2, recreated_groups)


def same_name_same_store(path):
    rank = int(os.environ["RANK"])
    store = dist.FileStore(path, 2)
    held = []
    for life in range(3):
        # gloo's own keys of an earlier life are in the way too, so each life has its prefix; the fused operators' store
        # must not need one.
        dist.init_process_group("gloo", store=dist.PrefixStore(f"life{life}", store), rank=rank, world_size=2)
        group = dist.group.WORLD
        held.append(dist.distributed_c10d._world.pg_map[group])
        dist.distributed_c10d._world.pg_map[group] = ("gloo", store)
        exchange(value=life)
        assert len(fused_ops.memory_report()) == 1
        dist.barrier()
        dist.destroy_process_group()
        del group
        gc.collect()


def test_a_group_made_anew_under_the_same_name_over_the_same_store(tmp_path):
    run_ranks(2, same_name_same_store, str(tmp_path / "store"), backend="")


def late_at_setup():
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    fused_ops.set_timeout(0.5, group)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(fused_ops.PeerTimeoutError, match=r"setting up group .* did not arrive: \[1\]"):
            exchange(group)
        assert time.monotonic() - start < 5
        with pytest.raises(fused_ops.PeerTimeoutError, match="failed earlier"):
            exchange(group)
    dist.barrier()
    exchange()


def test_setup_is_bounded_names_the_late_rank_and_spares_other_groups():
    run_ranks(2, late_at_setup)


def out_of_reach(monkey_rank):
    from fused_ops.symmetric.segment import SharedSegment

    if dist.get_rank() == monkey_rank:

        def refuse(pid, fd, size):
            raise PermissionError("no ptrace here")

        SharedSegment.open = refuse
    output = fused_ops.all_to_all(torch.arange(2.0))
    assert output.tolist() == [float(dist.get_rank())] * 2
    (operator, backend, reason), calls = next(iter(fused_ops.counters().items()))
    assert (operator, backend, calls) == ("all_to_all", "baseline", 1)
    assert f"rank {monkey_rank} cannot map the shared memory" in reason
    with pytest.raises(fused_ops.BackendUnavailableError, match="no ptrace here"):
        fused_ops.all_to_all(torch.arange(2.0), require_fused=True)


def test_ranks_that_cannot_map_each_others_memory_run_on_baseline_and_say_so():
    run_ranks(2, out_of_reach, 1)


def two_hosts():
    import fused_ops.symmetric.group as module

    rank = dist.get_rank()
    module.host_identity = lambda: f"host {rank // 2}"
    fused_ops.all_to_all(torch.zeros(3))
    assert any("spans 2 hosts" in reason for _, backend, reason in fused_ops.counters() if backend == "baseline")


def test_a_group_over_several_hosts_runs_on_baseline_and_says_so():
    run_ranks(3, two_hosts)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_means_nothing_is_refused(seconds):
    with pytest.raises(ValueError, match="positive seconds"):
        fused_ops.set_timeout(seconds)


@pytest.mark.parametrize("group", [None, "missing"])
def test_unknown_groups(group):
    with pytest.raises(ValueError, match="process group"):
        fused_ops.all_to_all(torch.zeros(2), group=group)
