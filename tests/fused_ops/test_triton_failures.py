"""What goes wrong in the Triton backend: in which words it is raised, that nothing is updated, that nobody waits for ever."""

import re
import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer, PeerAbortedError, PeerTimeoutError
from fused_ops.symmetric.group import context, group_name
from fused_ops.symmetric.triton_layout import Record
from tests.fused_ops.test_embedding_refusals import BAD_VALUES
from tests.fused_ops.triton_ranks import DEVICES, run_triton_ranks

TIMEOUT_S = 1.0

pytestmark = pytest.mark.parametrize("device", DEVICES)


def two_features(device, indices, offsets=(0, 2, 3, 3, 4), **options):
    """Two features of 4 wide over tables of 10 and 5 rows on rank 0 (the others own nothing), 2 samples in all."""
    world = dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[4, 4]] + [[]] * (world - 1), [2] + [0] * (world - 1))
    if dist.get_rank():
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return fused_ops.embedding_all_to_all([], nothing[:0], nothing, layout, comm="triton", **options)
    tables = [torch.arange(40.0, device=device).view(10, 4), torch.arange(20.0, device=device).view(5, 4)]
    lookups = (torch.tensor(indices, device=device), torch.tensor(offsets, device=device))
    return fused_ops.embedding_all_to_all(tables, *lookups, layout, comm="triton", **options)


def refused(call, *arguments):
    """The error of a call, raised at once or when the kernels' record is read."""
    try:
        call(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        fused_ops.check_errors()
    except Exception as error:
        return error
    return None


def bad_values(device):
    """The rank at fault says what is wrong, the others that it was rejected, and the channel goes on working."""
    for indices, offsets, message in BAD_VALUES:
        error = refused(two_features, device, indices, offsets)
        if dist.get_rank() == 0:
            assert type(error) is ValueError, repr(error)
            assert message in str(error)
        else:
            assert type(error) is PeerAbortedError, repr(error)
            assert "rank 0 rejected its input" in str(error)
        output = two_features(device, [0, 1, 2, 3])
        if dist.get_rank() == 0:
            assert output[:, 0].tolist() == [4.0, 8.0]
    for policy in ("clamp", "hash"):
        error = refused(empty_table, device, policy)
        assert ("which has 0 rows" if dist.get_rank() == 0 else "rank 0 rejected its input") in str(error)


def empty_table(device, policy):
    """A lookup in a table without rows, on rank 0."""
    layout = EmbeddingLayout.table_wise(
        [[3]] + [[]] * (dist.get_world_size() - 1), [1] + [0] * (dist.get_world_size() - 1)
    )
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    mine = ([torch.zeros(0, 3, device=device)], zero, torch.arange(2, device=device))
    arguments = mine if dist.get_rank() == 0 else ([], zero[:0], zero)
    fused_ops.embedding_all_to_all(*arguments, layout, out_of_range=policy, comm="triton")


def test_bad_indices_and_offsets_are_refused_on_every_rank(device):
    run_triton_ranks(3, device, bad_values, timeout=120)


def step(device, rank, world):
    """A forward of two lookups a sample with Adam, and its arguments."""
    layout = EmbeddingLayout.table_wise([[16]] * world, [2] * world)
    generator = torch.Generator().manual_seed(rank)
    table = torch.randn(50, 16, generator=generator).to(device)
    states = FusedOptimizer.make_states("adam", [table])
    indices = torch.randint(0, 50, (2 * layout.global_batch,), generator=generator).to(device)
    weights = torch.rand(len(indices), generator=generator).to(device).requires_grad_()
    offsets = torch.arange(layout.global_batch + 1, device=device) * 2
    optimizer = FusedOptimizer("adam", 0.1, states=states)

    def forward():
        return fused_ops.embedding_all_to_all(
            [table], indices, offsets, layout, per_sample_weights=weights, optimizer=optimizer, comm="triton"
        )

    return forward, indices, [table, *states], weights


def nothing_is_updated(device):
    """Until the failure of a forward is raised, everything that follows from it is NaN, and tables and states stay."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forward, indices, kept, weights = step(device, rank, world)
    forward().sum().backward()
    before = [t.clone() for t in kept]
    good = indices.clone()
    if rank == 1:
        indices[3] = 77
    output = forward()
    assert output.isnan().all()
    weights.grad = None
    (lane,) = context(group_name(None)).channels()
    serial = lane._record[Record.SERIAL]
    lane._record[Record.SERIAL] = 0  # as if the host launched backward before the kernels of forward had ended
    output.sum().backward()
    lane._record[Record.SERIAL] = serial
    assert weights.grad.isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    error = refused(fused_ops.check_errors)
    assert type(error) is (ValueError if rank == 1 else PeerAbortedError)
    if rank == 1:
        assert "index 77 (position 3, feature 0) is out of range for table 0, which has 50 rows" in str(error)
    indices.copy_(good)
    forward().sum().backward()
    fused_ops.check_errors()
    assert int(kept[-1]) == 2
    assert not torch.equal(kept[0], before[0])


def test_nothing_is_updated_after_a_failed_forward(device):
    run_triton_ranks(2, device, nothing_is_updated)


def late_peer(device, phase):
    rank, world = dist.get_rank(), dist.get_world_size()
    forward, _, kept, _ = step(device, rank, world)
    forward().sum().backward()
    fused_ops.check_errors()
    fused_ops.set_timeout(TIMEOUT_S)
    before = [t.clone() for t in kept]
    dist.barrier()
    output = forward() if phase == "backward" else None
    if rank == 1:
        time.sleep(3 * TIMEOUT_S)
        return "late"
    start = time.monotonic()
    error = refused(lambda: (forward() if output is None else output).sum().backward())
    assert time.monotonic() - start < TIMEOUT_S + 4  # interpreted kernels are slow
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    with pytest.raises(PeerTimeoutError, match="broken since"):
        forward()
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_peer_that_does_not_come_is_named(device, phase):
    first, late, last = run_triton_ranks(3, device, late_peer, phase)
    assert late == "late"
    for message in (first, last):
        assert message.startswith(
            f"PeerTimeoutError: embedding_all_to_all{' backward' if phase == 'backward' else ''}: "
        )
        assert "waited 1 s; ranks that did not arrive: [1]" in message


def late_peer_of_a_rejected_call(device):
    """The rank that rejects its input says that; that a peer did not even come to the call, it says at the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forward, indices, *_ = step(device, rank, world)
    forward()
    fused_ops.set_timeout(TIMEOUT_S)
    dist.barrier()
    if rank == 1:
        time.sleep(3 * TIMEOUT_S)
        return
    indices.data = indices.double()
    assert type(refused(forward)) is ValueError
    indices.data = indices.long()
    error = refused(forward)
    assert type(error) is PeerTimeoutError, repr(error)
    assert "ranks that did not arrive: [1]" in str(error)


def test_a_peer_that_does_not_come_to_a_rejected_call(device):
    run_triton_ranks(2, device, late_peer_of_a_rejected_call)


def rejections(device):
    """What the host sees: the peers' kernels, which are running by then, end with an error that says why."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forward, indices, *_ = step(device, rank, world)
    forward()
    for _ in range(3):  # the layout is known: no rank asks the others before it launches
        if rank == 0:
            indices.data = indices.double()
        error = refused(forward)
        if rank == 0:
            assert re.search("indices must be 1-D int32 or int64", str(error))
            indices.data = indices.long()
        else:
            assert type(error) is PeerAbortedError, repr(error)
            assert "rank 0 rejected its input or gave up: embedding_all_to_all: indices must be 1-D" in str(error)
    forward().sum().backward()
    fused_ops.check_errors()


def disagreements(device):
    rank, world = dist.get_rank(), dist.get_world_size()

    def call(batch_sizes):
        layout = EmbeddingLayout.table_wise([[4]] * world, batch_sizes)
        lookups = torch.arange(layout.global_batch + 1, device=device)
        return fused_ops.embedding_all_to_all(
            [torch.zeros(9, 4, device=device)], lookups[:-1], lookups, layout, comm="triton"
        )

    tail = [1] * (world - 2)
    unlike = [1, 2, *tail] if rank == 0 else [2, 1, *tail]
    assert re.search(r"ranks disagree.*batch_sizes", str(refused(call, unlike)))
    call([1, 2, *tail])
    call([2, 1, *tail])
    error = refused(call, unlike)  # both are known by now: the kernels notice
    assert isinstance(error, (ValueError, PeerAbortedError))
    assert "disagree" in str(error) or "gave up" in str(error)
    call([1, 1, *tail])
    fused_ops.check_errors()


def host_side_refusals(device):
    rejections(device)
    disagreements(device)


def test_rejected_input_and_disagreement_end_the_peers_kernels(device):
    run_triton_ranks(3, device, host_side_refusals)
