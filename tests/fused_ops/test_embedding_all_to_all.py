"""`fused_ops.embedding_all_to_all` against float64, against FBGEMM, and against everything that can be wrong with a call."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer, PeerAbortedError
from tests.fused_ops.embedding_reference import Case
from tests.ranks import run_ranks

BACKENDS = ["host", "unfused", "baseline"]
OPTIMIZERS = ["none", "sgd", "adagrad", "rowwise_adagrad"]


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
    rows, dim, batch, pooling = 70_000, 32, 64 * world, 30
    layout = EmbeddingLayout.table_wise([[dim, dim]] * world, [64] * world)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tables = [torch.randn(rows, dim, generator=generator) for _ in range(2)]
    hot = torch.randint(0, 50, (batch * pooling,), generator=generator)
    wide = torch.randint(0, rows, (batch * pooling,), generator=generator)
    offsets = torch.arange(2 * batch + 1) * pooling
    states = FusedOptimizer.make_states(optimizer, tables)
    optimizer = FusedOptimizer(optimizer, 0.1, 1e-8, states)
    arguments = (tables, torch.cat([hot, wide]), offsets, layout)
    return arguments, optimizer, torch.randn(64, layout.total_dim, generator=generator)


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
        OPTIMIZERS[1:], ["sum", "mean"], [torch.float32, torch.float16], [False, True]
    ):
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


# ---- what is refused ----


def two_features(indices, offsets=(0, 2, 3, 3, 4), rank=0, **options):
    """Two features of 4 wide over tables of 10 and 5 rows on rank 0 (the others own nothing), 2 samples in all."""
    world = dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[4, 4]] + [[]] * (world - 1), [2] + [0] * (world - 1))
    tables = [torch.arange(40.0).view(10, 4), torch.arange(20.0).view(5, 4)]
    if dist.get_rank() != rank:
        empty = torch.zeros(0, dtype=torch.int64)
        return fused_ops.embedding_all_to_all([], empty, torch.zeros(1, dtype=torch.int64), layout, **options)
    return fused_ops.embedding_all_to_all(tables, torch.tensor(indices), torch.tensor(offsets), layout, **options)


BAD_VALUES = [
    ([0, 9, 10, 4], (0, 2, 3, 3, 4), "index 10 (position 2, feature 0) is out of range for table 0, which has 10 rows"),
    ([0, 9, 9, 5], (0, 2, 3, 3, 4), "index 5 (position 3, feature 1) is out of range for table 1, which has 5 rows"),
    ([0, -1, 9, 4], (0, 2, 3, 3, 4), "index -1 (position 1, feature 0) is out of range for table 0"),
    ([0, 2**40, 9, 4], (0, 2, 3, 3, 4), f"index {2**40} (position 1, feature 0) is out of range for table 0"),
    ([0, 1, 2, 3], (1, 2, 3, 3, 4), "offsets must start with 0, got 1"),
    ([0, 1, 2, 3], (0, 2, 3, 3, 5), "offsets must end with the number of indices, 4, got 5"),
    ([0, 1, 2, 3], (0, 3, 2, 3, 4), "offsets must not decrease: offsets[2] = 2 is below offsets[1] (feature 0)"),
    ([0, 1, 2, 3], (0, 2, 3, 4), "offsets needs 5 entries (2 local features x 2 samples of all ranks + 1), got 4"),
]


def rejections():
    """The rank at fault says what is wrong, the others that it was rejected, and the channel goes on working."""
    for backend, (indices, offsets, message) in itertools.product(["host", "unfused"], BAD_VALUES):
        with pytest.raises(ValueError if dist.get_rank() == 0 else PeerAbortedError) as caught:
            two_features(indices, offsets, comm=backend)
        assert message in str(caught.value), (backend, str(caught.value))
        output = two_features([0, 1, 2, 3], comm=backend)
        if dist.get_rank() == 0:
            assert output[:, 0].tolist() == [4.0, 8.0]


def test_bad_indices_and_offsets_are_refused_on_every_rank():
    run_ranks(3, rejections)


def baseline_rejections():
    for indices, offsets, message in BAD_VALUES:
        with pytest.raises(ValueError) as caught:
            two_features(indices, offsets, comm="baseline")
        assert message in str(caught.value)


def policies():
    index_types = [torch.int64, torch.int32]
    for backend, index_type, policy in itertools.product(BACKENDS, index_types, ["clamp", "hash"]):
        table = torch.arange(7.0)[:, None].repeat(1, 3)
        indices = torch.tensor([0, 6, 7, -1, 15, -15], dtype=index_type)
        before = indices.clone()
        layout = EmbeddingLayout.table_wise([[3]], [6])
        optimizer = FusedOptimizer("sgd", 1.0)
        output = fused_ops.embedding_all_to_all(
            [table], indices, torch.arange(7), layout, out_of_range=policy, comm=backend, optimizer=optimizer
        )
        rows = [0, 6, 6, 0, 6, 0] if policy == "clamp" else [0, 6, 0, 6, 1, 6]
        assert output[:, 0].tolist() == rows, (backend, policy)
        output.backward(torch.ones_like(output))
        assert table[:, 0].tolist() == [r - rows.count(r) for r in range(7)], (backend, policy)
        assert torch.equal(indices, before)
        with pytest.raises(ValueError, match="which has 0 rows"):
            fused_ops.embedding_all_to_all(
                [table[:0]], indices, torch.arange(7), layout, out_of_range=policy, comm=backend
            )


def wrong_arguments():
    layout = EmbeddingLayout.table_wise([[4]], [2])
    good = dict(
        tables=[torch.zeros(5, 4)], indices=torch.zeros(2, dtype=torch.int64), offsets=torch.arange(3), layout=layout
    )
    cases = [
        (dict(tables=[torch.zeros(5, 3)]), "feature 0 is 4 wide in the layout, its table 0 is 3"),
        (
            dict(tables=[torch.zeros(5, 4).half()]),
            "must be a contiguous [rows, dim] tensor of the layout's torch.float32",
        ),
        (dict(tables=[torch.zeros(4, 5).t()]), "non-contiguous"),
        (dict(tables=[]), "feature 0 looks up table 0, but this rank has 0 tables"),
        (dict(feature_tables=[1]), "feature 0 looks up table 1"),
        (dict(feature_tables=[0, 0]), "feature_tables needs one entry a local feature (1), got 2"),
        (dict(indices=torch.zeros(2)), "indices must be 1-D int32 or int64"),
        (dict(indices=torch.zeros(2, 1, dtype=torch.int64)), "indices must be 1-D int32 or int64"),
        (dict(offsets=torch.arange(3.0)), "offsets must be 1-D int32 or int64"),
        (dict(per_sample_weights=torch.zeros(3)), "per_sample_weights must be float32 [2]"),
        (dict(per_sample_weights=torch.zeros(2).double()), "per_sample_weights must be float32 [2]"),
        (dict(pooling="max"), "pooling must be one of sum, mean, got 'max'"),
        (dict(out_of_range="wrap"), "out_of_range must be one of error, clamp, hash, got 'wrap'"),
        (dict(layout=EmbeddingLayout.table_wise([[4], []], [1, 1])), "layout is for 2 ranks, the group has 1"),
        (dict(optimizer=FusedOptimizer("adagrad")), "optimizer adagrad needs one state a table (1), got 0"),
        (dict(optimizer=FusedOptimizer("adagrad", states=[torch.zeros(5)])), "must be contiguous float32 [5, 4]"),
        (
            dict(optimizer=FusedOptimizer("rowwise_adagrad", states=[torch.zeros(5, 4)])),
            "must be contiguous float32 [5]",
        ),
        (dict(optimizer=FusedOptimizer("sgd", states=[torch.zeros(5)])), "optimizer sgd keeps no states, got 1"),
        (dict(comm="hsot"), "comm must be 'fused', 'baseline' or a backend"),
        (dict(comm="baseline", require_fused=True), "require_fused=True contradicts comm='baseline'"),
    ]
    for backend, (change, message) in itertools.product(BACKENDS, cases):
        with pytest.raises(ValueError) as caught:
            fused_ops.embedding_all_to_all(**{"comm": backend, **good, **change})
        assert message in str(caught.value), (backend, change, str(caught.value))


def refusals_of_one_rank():
    baseline_rejections()
    policies()
    wrong_arguments()


def test_policies_and_wrong_arguments():
    run_ranks(1, refusals_of_one_rank)


def disagreements():
    rank, world = dist.get_rank(), dist.get_world_size()

    def call(batch_sizes, dtype=torch.float32):
        layout = EmbeddingLayout.table_wise([[4]] * world, batch_sizes, dtype)
        batch = layout.global_batch
        tables = [torch.zeros(3, 4, dtype=dtype)]
        return fused_ops.embedding_all_to_all(
            tables, torch.zeros(batch, dtype=torch.int64), torch.arange(batch + 1), layout, comm="host"
        )

    with pytest.raises(ValueError, match=r"ranks disagree.*batch_sizes"):
        call([1, 2] if rank == 0 else [2, 1])
    with pytest.raises(ValueError, match=r"ranks disagree.*float16"):
        call([1, 1], torch.float16 if rank else torch.float32)
    call([1, 1])
    # Both layouts known by now: no descriptor is read ahead, and still nobody hangs.
    call([2, 2])
    with contextlib.suppress(ValueError):
        call([1, 1] if rank == 0 else [2, 2])
        raise AssertionError("ranks with different layouts must not both succeed")


def test_ranks_that_disagree():
    run_ranks(2, disagreements)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[4], [4]], [[0], [3]], [1, 1], 8), "overlap between feature 0 of rank 0 and feature 0 of rank 1"),
        (([[4], [4]], [[0], [5]], [1, 1], 9), "hole between feature 0 of rank 0 and feature 0 of rank 1"),
        (([[4], [4]], [[1], [5]], [1, 1], 9), "hole between the start and feature 0 of rank 0"),
        (([[4], [4]], [[0], [4]], [1, 1], 9), "the features cover 8 columns, total_dim is 9"),
        (([[4], [0]], [[0], [4]], [1, 1], 4), "feature 0 of rank 1 has width 0"),
        (([[4], [4]], [[0], [4, 8]], [1, 1], 8), "rank 1 has 1 feature_dims and 2 feature_columns"),
        (([[4], [4]], [[0], [4]], [1], 8), "batch_sizes has 1 ranks, feature_dims 2"),
        (([[4], [4]], [[0], [4]], [1, -1], 8), "batch_sizes must not be negative"),
        (([[4]], [[0]], [1], 4, torch.int8), "dtype must be one of torch.float32, torch.float16, torch.bfloat16"),
    ],
)
def test_bad_layouts(arguments, message):
    with pytest.raises(ValueError) as caught:
        EmbeddingLayout(*arguments)
    assert message in str(caught.value)


def test_layout_survives_an_operators_schema():
    layout = EmbeddingLayout([[4, 2], [], [3]], [[3, 7], [], [0]], [2, 0, 5], 9, torch.float16)
    assert EmbeddingLayout.decode(layout.encoded, torch.float16) == layout


def test_bad_optimizers():
    with pytest.raises(ValueError, match="kind must be one of sgd, adagrad, rowwise_adagrad, got 'adam'"):
        FusedOptimizer("adam")
    with pytest.raises(ValueError, match="eps must not be negative"):
        FusedOptimizer(eps=-1.0)


# ---- under torch.library and torch.compile ----


def library_checks():
    from fused_ops.embedding_all_to_all import _ANCHOR

    ops, group = torch.ops.fused_ops, dist.group.WORLD.group_name
    table, indices, offsets = torch.randn(9, 16), torch.randint(0, 9, (20,)), torch.arange(11) * 2
    layout = EmbeddingLayout.table_wise([[16, 16]], [5])
    weights, state, lr = torch.rand(20), torch.rand(9), torch.tensor([0.1])
    lookups = (indices, offsets, weights, [0, 0], layout.encoded, layout.dtype, "mean", "error")
    where = (group, 0, "host", False)
    for kind, leaf in (("none", table.clone().requires_grad_()), ("rowwise_adagrad", table)):
        states, rate = ([], None) if kind == "none" else ([state.clone()], lr)
        forward = (_ANCHOR, [leaf], *lookups, kind, states, rate, 1e-6, True, *where)
        torch.library.opcheck(ops.embedding_all_to_all.default, forward)
    exchange = (torch.randn(5, 32), [table], *lookups, True, *where)
    torch.library.opcheck(ops.embedding_all_to_all_gradient.default, exchange)
    grad, order = ops.embedding_all_to_all_gradient(*exchange)
    local = (*lookups, True, group, "host", False)
    update = (grad, order, [table.clone()], [state], lr, 1e-6, "rowwise_adagrad", *local)
    torch.library.opcheck(ops.embedding_update.default, update)
    torch.library.opcheck(ops.embedding_gradients.default, (grad, order, [table], [0], *local))


def test_opcheck():
    run_ranks(1, library_checks)


def five_equal_calls(backend):
    """Equal calls may not be merged, unused ones not dropped; updates land once each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[8]] * world, [3] * world)
    indices, offsets = torch.arange(3 * world) % 4, torch.arange(3 * world + 1)

    def step(tables, optimizer, x):
        outputs = [
            fused_ops.embedding_all_to_all(tables, indices, offsets, layout, optimizer=optimizer, comm="host")
            for _ in range(5)
        ]
        fused_ops.all_to_all(x, comm="host")  # its result is not used
        return sum((output * x).sum() for output in outputs)

    results = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        for kind in ("none", "rowwise_adagrad"):
            table = torch.arange(32.0).view(4, 8) * 0.01 + rank
            table.requires_grad_(kind == "none")
            states = [] if kind == "none" else [torch.zeros(4)]
            optimizer = None if kind == "none" else FusedOptimizer(kind, 0.1, 1e-8, states)
            x = torch.linspace(0, 1, 3 * 8 * world).view(3, 8 * world).requires_grad_()
            fused_ops.reset_counters()
            loss = function([table], optimizer, x)
            loss.backward()
            calls = {key[0]: n for key, n in fused_ops.counters().items()}
            last = "gradients" if kind == "none" else "update"
            assert calls == {
                "embedding_all_to_all": 5,
                "all_to_all": 1,
                "embedding_all_to_all_gradient": 5,
                f"embedding_all_to_all_{last}": 5,
            }, (backend, kind, calls)
            results.append([loss.detach(), table.detach(), x.grad, *states, *([table.grad] if kind == "none" else [])])
    half = len(results) // 2
    for eager, compiled in zip(results[:half], results[half:], strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_keeps_every_call(backend):
    run_ranks(1, five_equal_calls, backend, timeout=240, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})
