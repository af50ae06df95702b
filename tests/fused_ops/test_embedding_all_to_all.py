"""`fused_ops.embedding_all_to_all` against float64 and against FBGEMM; what must be equal to the bit; several at once."""

import itertools

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.fused_ops.embedding_reference import Case
from tests.ranks import run_ranks

BACKENDS = ["host", "unfused", "baseline"]
OPTIMIZERS = ["none", "sgd", "adagrad", "rowwise_adagrad", "adam"]


def sweep(seeds, backends):
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        case = Case.random(seed, world)
        for backend in backends:
            try:
                case.check(rank, case.run(rank, comm=backend))
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed} on {backend}: {case.layout}, {case.optimizer}, {case.pooling}\n{error}"
                ) from None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_calls_match_float64(world):
    run_ranks(world, sweep, range(1000 * world, 1000 * world + 40), BACKENDS, timeout=120)


# ---- what stays the same to the bit ----


def repeats(seeds):
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        case = Case.random(seed, world)
        torch.set_num_threads(1)
        first = case.run(rank, comm="host")
        assert first.equals(case.run(rank, comm="host")), f"seed {seed} differs from run to run"
        torch.set_num_threads(3)
        assert first.equals(case.run(rank, comm="host")), f"seed {seed} depends on the number of threads"
        assert first.equals(case.run(rank, comm="unfused")), f"seed {seed} differs from the unfused backend"


def large_case(optimizer, world):
    """Big enough for several tasks a thread, and for the radix sort to run in several passes."""
    rows, dim, batch, pooling = 70_000, 32, 400 * world, 30
    layout = EmbeddingLayout.table_wise([[dim, dim]] * world, [400] * world)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tables = [torch.randn(rows, dim, generator=generator) for _ in range(2)]
    hot = torch.randint(0, 50, (batch * pooling,), generator=generator)
    wide = torch.randint(0, rows, (batch * pooling,), generator=generator)
    offsets = torch.arange(2 * batch + 1) * pooling
    states = FusedOptimizer.make_states(optimizer, tables)
    optimizer = FusedOptimizer(optimizer, 0.1, 1e-8, states)
    arguments = (tables, torch.cat([hot, wide]), offsets, layout)
    return arguments, optimizer, torch.randn(400, layout.total_dim, generator=generator)


def large_repeats():
    for kind in OPTIMIZERS[1:]:
        results = []
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            arguments, optimizer, grad = large_case(kind, dist.get_world_size())
            output = fused_ops.embedding_all_to_all(*arguments, optimizer=optimizer, comm="host")
            results.append([output.detach().clone()])
            output.backward(grad)
            results[-1] += [*arguments[0], *optimizer.states]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), kind


def held_outputs():
    rank, world = dist.get_rank(), dist.get_world_size()
    held = []
    for seed in range(30):
        case = Case.random(seed % 5, world)  # shapes alternate
        mine = case.ranks[rank]
        output = fused_ops.embedding_all_to_all(
            mine.tables, mine.indices, mine.offsets, case.layout, feature_tables=mine.feature_tables, comm="host"
        )
        held.append((output.detach(), output.detach().clone()))
    assert all(torch.equal(output, copy) for output, copy in held)


def inputs_unchanged():
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed, backend in itertools.product(range(5), BACKENDS):
        case = Case.random(seed, world, optimizer="none")
        mine = case.ranks[rank]
        inputs = [
            *mine.tables,
            mine.indices,
            mine.offsets,
            mine.output_grad,
            *([] if mine.weights is None else [mine.weights]),
        ]
        before = [t.clone() for t in inputs]
        case.run(rank, comm=backend)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def same_to_the_bit():
    repeats(range(12))
    large_repeats()
    held_outputs()
    inputs_unchanged()


def test_bits_do_not_depend_on_run_threads_or_later_calls():
    run_ranks(2, same_to_the_bit)


# ---- several at once ----


def two_in_flight():
    """Backwards in the other order than forwards, on two channels; both update the same tables."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[8]] * world, [3] * world)
    batch = layout.global_batch
    torch.manual_seed(rank)
    table = torch.randn(20, 8)
    before = table.clone()
    optimizer = FusedOptimizer("sgd", 1.0)
    indices = [torch.randint(0, 20, (batch,)) for _ in range(2)]
    outputs = [
        fused_ops.embedding_all_to_all(
            [table], i, torch.arange(batch + 1), layout, optimizer=optimizer, channel=c, comm="host"
        )
        for c, i in enumerate(indices)
    ]
    for output in reversed(outputs):
        output.backward(torch.ones_like(output))
    expected = before.double()
    for i in indices:
        expected.index_add_(0, i, torch.full((batch, 8), -1.0 / world, dtype=torch.float64))
    torch.testing.assert_close(table.double(), expected)


def subgroups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    for seed in range(6):
        case = Case.random(seed + 10 * (rank % 2), 2)
        case.check(rank // 2, case.run(rank // 2, comm="host", group=group))
        whole = Case.random(seed + 100, 4)
        whole.check(rank, whole.run(rank, comm="host"))


def test_two_calls_in_flight_update_one_table():
    run_ranks(2, two_in_flight)


def test_subgroups_beside_the_world():
    run_ranks(4, subgroups)


# ---- FBGEMM itself ----


def tbe(tables, kind, pooling, states_of=None):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.shape[0], t.shape[1], EmbeddingLocation.HOST, ComputeDevice.CPU) for t in tables],
        feature_table_map=[0, 0, 1],
        optimizer={
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }[kind],
        learning_rate=0.1,
        eps=1e-6,
        weights_precision=SparseType.from_dtype(tables[0].dtype),
        output_dtype=SparseType.from_dtype(tables[0].dtype),
        pooling_mode=PoolingMode.SUM if pooling == "sum" else PoolingMode.MEAN,
        stochastic_rounding=False,
    )
    for weight, table in zip(module.split_embedding_weights(), tables, strict=True):
        weight.copy_(table)
    return module


def against_fbgemm():
    """Three steps with the module that TorchRec shards: the optimizer's exact semantics, states and rate included."""
    batch = 33
    for kind, pooling, dtype, weighted in itertools.product(
        ["sgd", "adagrad", "rowwise_adagrad"], ["sum", "mean"], [torch.float32, torch.float16], [False, True]
    ):  # FBGEMM has no Adam on CPU
        if weighted and pooling == "mean":
            continue  # wrong in FBGEMM 1.8 on CPU: forward in fp16, backward in either
        torch.manual_seed(3)
        tables = [torch.randn(50, 64).to(dtype), torch.randn(90, 20).to(dtype)]
        module = tbe(tables, kind, pooling)
        states = FusedOptimizer.make_states(kind, tables)
        optimizer = FusedOptimizer(kind, 0.1, 1e-6, states)
        layout = EmbeddingLayout.table_wise([[64, 64, 20]], [batch], dtype)
        lengths = torch.randint(0, 9, (3 * batch,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        for step in range(3):
            indices = torch.randint(0, 50, (int(offsets[-1]),))
            weights = torch.rand(len(indices)) if weighted else None
            theirs = module(indices, offsets, per_sample_weights=weights)
            ours = fused_ops.embedding_all_to_all(
                tables, indices, offsets, layout, feature_tables=[0, 0, 1], pooling=pooling, per_sample_weights=weights,
                optimizer=optimizer, comm="host",
            )  # fmt: skip
            what = f"{kind} {pooling} {dtype} weighted={weighted} step {step}"
            if step == 0 and dtype == torch.float32:
                assert torch.equal(ours, theirs), f"{what}: forward differs from FBGEMM's"
            tolerance = 1e-5 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, w=what: f"{w}: {m}")
            grad = torch.randn_like(ours)
            # Between forward and backward: it is the next step's rate.
            module.set_learning_rate(0.1 / (step + 1))
            optimizer.learning_rate = 0.1 / (step + 1)
            theirs.backward(grad)
            ours.backward(grad)
            for mine, weight in zip(tables, module.split_embedding_weights(), strict=True):
                torch.testing.assert_close(
                    mine, weight, rtol=tolerance, atol=tolerance, msg=lambda m, w=what: f"{w}: {m}"
                )
            for mine, state in zip(
                states, [s[0] for s in module.split_optimizer_states()] if states else [], strict=True
            ):
                torch.testing.assert_close(
                    mine, state.view_as(mine), rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-5
                )


def test_forward_and_updates_are_fbgemms():
    pytest.importorskip("fbgemm_gpu")
    run_ranks(1, against_fbgemm)


def baseline_kernels():
    for dtype, kernels in ((torch.float32, "fbgemm"), (torch.bfloat16, "torch")):
        fused_ops.reset_counters()
        case = Case.random(11, 1, dtype=dtype)
        case.ranks[0].feature_tables.sort()
        case.run(0, comm="baseline")
        assert {key[1] for key in fused_ops.counters() if key[0] == "embedding_all_to_all_kernels"} == {kernels}


def test_counters_say_which_kernels_baseline_ran():
    pytest.importorskip("fbgemm_gpu")
    run_ranks(1, baseline_kernels)
