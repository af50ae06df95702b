"""`fused_ops.embedding_all_to_all` in Triton against float64; what must be equal to the bit; several at once."""

import itertools

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.fused_ops.triton_ranks import DEVICES, run_case, run_triton_ranks, small_case

OPTIMIZERS = ["none", "sgd", "adagrad", "rowwise_adagrad", "adam"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def checked(case, device, what):
    try:
        case.check(dist.get_rank(), run_case(case, device))
        fused_ops.check_errors()
    except AssertionError as error:
        raise AssertionError(f"{what}: {case.layout}, {case.optimizer}, {case.pooling}\n{error}") from None


def sweep(device):
    fused_ops.reset_counters()
    world = dist.get_world_size()
    every_pair = list(itertools.product(OPTIMIZERS, DTYPES))
    for seed, (optimizer, dtype) in enumerate(every_pair if world == 2 else every_pair[::4]):
        everywhere = lambda case, s=seed: s % 3 == 0 or all(len(r.indices) for r in case.ranks)  # noqa: E731
        case = small_case(1000 * seed, world, accept=everywhere, optimizer=optimizer, dtype=dtype)
        checked(case, device, f"case {seed}")
    return {backend for _, backend, _ in fused_ops.counters()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_calls_match_float64(device, world):
    assert run_triton_ranks(world, device, sweep, timeout=120) == [{"triton"}] * world


def most_lookups_of_a_row(case):
    counts = [torch.bincount(rank.indices.long()).max() for rank in case.ranks if len(rank.indices)]
    return int(max(counts, default=0))


def edges(device):
    """A row that is looked up more often than a piece is long, weights, features that share a table, empty batches."""
    world = dist.get_world_size()
    long_rows = lambda case: most_lookups_of_a_row(case) > 130 and case.layout.total_dim < 100  # noqa: E731
    for optimizer in ("none", "adam"):
        checked(small_case(7, world, 400, long_rows, optimizer=optimizer, dtype=torch.float32), device, "long rows")
    for pooling in ("sum", "mean"):
        weighted = lambda case, p=pooling: case.ranks[0].weights is not None and case.pooling == p  # noqa: E731
        checked(small_case(8, world, 40, weighted, optimizer="sgd"), device, f"weighted {pooling}")
    shared = lambda case: any(len(set(r.feature_tables)) < len(r.feature_tables) for r in case.ranks)  # noqa: E731
    checked(small_case(9, world, 40, shared, optimizer="rowwise_adagrad"), device, "a table of two features")
    empty = lambda case: 0 in case.layout.batch_sizes and [] in [r.tables for r in case.ranks]  # noqa: E731
    checked(small_case(10, world, 40, empty, optimizer="adagrad"), device, "an empty batch, a rank without tables")


def test_long_rows_weights_shared_tables_and_empty_ranks(device):
    run_triton_ranks(2, device, edges, timeout=120)


def repeats(device):
    world = dist.get_world_size()
    for seed in range(4):
        case = small_case(50 * seed, world, optimizer=OPTIMIZERS[1 + seed])
        first = run_case(case, device)
        fused_ops.set_num_sms(1 if seed % 2 else None)
        assert first.equals(run_case(case, device)), f"case {seed} differs from run to run"
        fused_ops.set_num_sms(None)


def held_outputs(device):
    """More outputs alive than there are slots, of shapes that grow: no later call changes one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = []
    for step in range(7):
        batch = [2 + 3000 * (step // 4)] * world  # the arena grows half-way
        layout = EmbeddingLayout.table_wise([[8]] * world, batch)
        table = torch.full((3, 8), 10.0 * step + rank, device=device)
        lookups = torch.zeros(layout.global_batch, dtype=torch.int64, device=device)
        offsets = torch.arange(layout.global_batch + 1, device=device).clamp(max=1)
        output = fused_ops.embedding_all_to_all([table], lookups[:1], offsets, layout, comm="triton")
        held.append((output, output.clone()))
        expected = [10.0 * step + r if batch[0] and rank == 0 else 0.0 for r in range(world)]
        assert output[0, ::8].tolist() == expected
    assert all(torch.equal(output, copy) for output, copy in held)


def policies(device):
    """What clamp and hash make of indices beyond the table, in forward and in the update; the indices stay as they are."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for index_type, policy in itertools.product([torch.int64, torch.int32], ["clamp", "hash"]):
        table = torch.arange(7.0, device=device)[:, None].repeat(1, 3)
        indices = torch.tensor([0, 6, 7, -1, 15, -15], dtype=index_type, device=device)
        before = indices.clone()
        layout = EmbeddingLayout.table_wise([[3]] + [[]] * (world - 1), [6] + [0] * (world - 1))
        nothing = torch.zeros(0, dtype=index_type, device=device)
        mine = ([table], indices, torch.arange(7, device=device)) if rank == 0 else ([], nothing, before[:1].long())
        optimizer = FusedOptimizer("sgd", 1.0, device=device)
        output = fused_ops.embedding_all_to_all(
            *mine, layout, optimizer=optimizer, out_of_range=policy, average_over_ranks=False, comm="triton"
        )
        output.backward(torch.ones_like(output))
        fused_ops.check_errors()
        if rank == 0:
            rows = [0, 6, 6, 0, 6, 0] if policy == "clamp" else [0, 6, 0, 6, 1, 6]
            assert output[:, 0].tolist() == rows, policy
            assert table[:, 0].tolist() == [r - rows.count(r) for r in range(7)], policy
        assert torch.equal(indices, before)


def same_to_the_bit(device):
    repeats(device)
    held_outputs(device)
    policies(device)


def test_bits_do_not_depend_on_run_or_later_calls_and_policies_hold(device):
    run_triton_ranks(2, device, same_to_the_bit, timeout=120)


def groups_and_channels(device):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[rank % 2]
    for channel in (0, 3):
        case = small_case(10 * (rank % 2), dist.get_world_size(group))
        case.check(dist.get_rank(group), run_case(case, device, group=group, channel=channel))
        whole = small_case(20, 3)
        whole.check(rank, run_case(whole, device))
    _two_in_flight(device)


def _two_in_flight(device):
    """Backwards in the other order than forwards, on two channels; both update the same table."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[8]] * world, [3] * world)
    batch = layout.global_batch
    table = torch.randn(20, 8, generator=torch.Generator().manual_seed(rank)).to(device)
    before = table.clone()
    indices = [torch.arange(batch, device=device) + shift for shift in (0, 4)]
    optimizer = FusedOptimizer("sgd", 1.0, device=device)
    offsets = torch.arange(batch + 1, device=device)
    outputs = [
        fused_ops.embedding_all_to_all([table], i, offsets, layout, optimizer=optimizer, channel=c, comm="triton")
        for c, i in enumerate(indices)
    ]
    for output in reversed(outputs):
        output.backward(torch.ones_like(output))
    expected = before.double()
    for i in indices:
        expected.index_add_(0, i, torch.full((batch, 8), -1.0 / world, dtype=torch.float64, device=device))
    torch.testing.assert_close(table.double(), expected)
    fused_ops.check_errors()


def test_subgroups_channels_and_two_calls_in_flight(device):
    run_triton_ranks(3, device, groups_and_channels, timeout=120)
