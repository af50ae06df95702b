"""Where sizes and strides of `embedding_all_to_all`'s inputs are extreme."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.ranks import run_ranks

BACKENDS = ["host", "unfused", "baseline"]
NO_LOOKUPS = (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def beyond_32_bits():
    """Tables of more than 2^31 elements, and of more than 2^31 rows; pages that nobody touches cost nothing."""
    elements, many_rows = (2**31 // 64 + 1000, 64), (2**31 + 1000, 1)
    for comm in BACKENDS:
        for kind, (rows, dim) in (("sgd", elements), ("rowwise_adagrad", elements), ("sgd", many_rows)):
            layout = EmbeddingLayout.table_wise([[dim], []], [2, 2], torch.float16)
            tables, states, lookups = [], [], NO_LOOKUPS
            if dist.get_rank() == 0:
                table = torch.empty(rows, dim, dtype=torch.float16)
                hit = torch.tensor([0, rows - 1, rows - 1, rows - 900, 7])
                table[hit] = torch.tensor([1.0, 2.0, 2.0, 3.0, 4.0], dtype=torch.float16)[:, None]
                states = [] if kind == "sgd" else [torch.empty(rows)]
                for state in states:
                    state[hit] = 0.0
                tables, lookups = [table], (hit, torch.tensor([0, 1, 3, 4, 5]))
            output = fused_ops.embedding_all_to_all(
                tables,
                *lookups,
                layout,
                optimizer=FusedOptimizer(kind, 0.5, states=states),
                average_over_ranks=False,
                comm=comm,
            )
            assert output[:, -1].tolist() == ([1.0, 4.0] if dist.get_rank() == 0 else [3.0, 4.0]), (comm, kind, dim)
            output.backward(torch.ones_like(output))
            if dist.get_rank() == 0:
                last = 1.0 if kind == "sgd" else 1.5  # hit twice: Adagrad divides by the root of 2^2
                assert table[hit][:, -1].tolist() == [0.5, last, last, 2.5, 3.5], (comm, kind, dim)
            dist.barrier()


def test_tables_beyond_32_bits():
    run_ranks(2, beyond_32_bits)


def one_huge_bag():
    rank, nnz, rows, dim = dist.get_rank(), 200_000, 1000, 33
    for comm, pooling, dtype in (
        (c, p, d) for c in BACKENDS for p, d in (("sum", torch.float32), ("mean", torch.half))
    ):
        layout = EmbeddingLayout.table_wise([[dim]] * 2, [1, 1], dtype)
        generator = torch.Generator().manual_seed(rank)
        table = torch.randn(rows, dim, generator=generator).to(dtype)
        indices = torch.randint(0, rows, (nnz,), generator=generator)
        factors = torch.rand(nnz, generator=generator)
        table.requires_grad_()
        weights = factors.clone().requires_grad_()
        offsets = torch.tensor([0, nnz, nnz])
        output = fused_ops.embedding_all_to_all(
            [table], indices, offsets, layout, pooling=pooling, per_sample_weights=weights, comm=comm
        )
        scale = nnz if pooling == "mean" else 1
        if rank == 0:
            exact = (table.detach().double()[indices] * factors.double()[:, None]).sum(0) / scale
            close(output[0, :dim], exact, dtype)
        output.backward(torch.ones_like(output))  # averaged over 2 ranks
        per_row = torch.zeros(rows, dtype=torch.float64).index_add_(0, indices, factors.double()) / scale / 2
        close(table.grad, per_row[:, None].expand(-1, dim), dtype)
        close(weights.grad, table.detach().double()[indices].sum(1) / scale / 2, dtype)


def close(got, want, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def test_a_bag_of_200000_lookups():
    run_ranks(2, one_huge_bag)


def strided_and_alternating():
    """No input need be contiguous, and layouts of equally many lookups may take turns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    table = torch.randn(20, 4, generator=generator)
    batches = [[2] * world, [0] * (world - 1) + [2 * world], [2 * world] + [0] * (world - 1)]
    for step in range(12):
        sizes = batches[step % 3]
        layout = EmbeddingLayout.table_wise([[4]] * world, sizes)
        batch = layout.global_batch
        indices = torch.randint(0, 20, (2 * batch, 3), generator=generator)[:, 1]
        offsets = torch.stack([torch.arange(batch + 1) * 2] * 2, 1)[:, 1]
        weights = torch.rand(2 * batch, 2, generator=generator)[:, 0]
        grad = torch.randn(layout.total_dim, sizes[rank], generator=generator).t()
        results = []
        for comm in BACKENDS:
            leaves = [table.clone().requires_grad_(), weights.detach().requires_grad_()]
            output = fused_ops.embedding_all_to_all(
                leaves[:1], indices, offsets, layout, per_sample_weights=leaves[1], comm=comm
            )
            output.backward(grad)
            results.append([output.detach().clone(), *(leaf.grad for leaf in leaves)])
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("world", [2, 5])
def test_strided_inputs_and_layouts_that_take_turns(world):
    run_ranks(world, strided_and_alternating)
