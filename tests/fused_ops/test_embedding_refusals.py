"""What `fused_ops.embedding_all_to_all` refuses, in which words, and that no rank is left waiting for one that refused."""

import contextlib
import itertools
import re

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer, PeerAbortedError
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from tests.ranks import run_ranks

BACKENDS = ["host", "unfused", "baseline"]


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
        error = ValueError if dist.get_rank() == 0 else PeerAbortedError
        with pytest.raises(error, match=re.escape(message)):
            two_features(indices, offsets, comm=backend)
        output = two_features([0, 1, 2, 3], comm=backend)
        if dist.get_rank() == 0:
            assert output[:, 0].tolist() == [4.0, 8.0]


def test_bad_indices_and_offsets_are_refused_on_every_rank():
    run_ranks(3, rejections)


def baseline_rejections():
    for indices, offsets, message in BAD_VALUES:
        with pytest.raises(ValueError, match=re.escape(message)):
            two_features(indices, offsets, comm="baseline")


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
    good = {
        "tables": [torch.zeros(5, 4)],
        "indices": torch.zeros(2, dtype=torch.int64),
        "offsets": torch.arange(3),
        "layout": layout,
    }
    overlapping = torch.zeros(6, 4)
    cases = [
        ({"tables": [torch.zeros(5, 3)]}, "feature 0 is 4 wide in the layout, its table 0 is 3"),
        (
            {"tables": [torch.zeros(5, 4).half()]},
            "must be a contiguous [rows, dim] tensor of the layout's torch.float32",
        ),
        ({"tables": [torch.zeros(4, 5).t()]}, "non-contiguous"),
        ({"tables": []}, "feature 0 looks up table 0, but this rank has 0 tables"),
        ({"feature_tables": [1]}, "feature 0 looks up table 1"),
        ({"feature_tables": [0, 0]}, "feature_tables needs one entry a local feature (1), got 2"),
        ({"indices": torch.zeros(2)}, "indices must be 1-D int32 or int64"),
        ({"indices": torch.zeros(2, 1, dtype=torch.int64)}, "indices must be 1-D int32 or int64"),
        ({"offsets": torch.arange(3.0)}, "offsets must be 1-D int32 or int64"),
        ({"per_sample_weights": torch.zeros(3)}, "per_sample_weights must be float32 [2]"),
        ({"per_sample_weights": torch.zeros(2).double()}, "per_sample_weights must be float32 [2]"),
        ({"pooling": "max"}, "pooling must be one of sum, mean, got 'max'"),
        ({"out_of_range": "wrap"}, "out_of_range must be one of error, clamp, hash, got 'wrap'"),
        ({"layout": EmbeddingLayout.table_wise([[4], []], [1, 1])}, "layout is for 2 ranks, the group has 1"),
        (
            {"optimizer": FusedOptimizer("adagrad")},
            "optimizer adagrad keeps 1 state(s) a table (1 here): expected 1 tensors, got 0",
        ),
        ({"optimizer": FusedOptimizer("adagrad", states=[torch.zeros(5)])}, "must be contiguous float32 [5, 4]"),
        (
            {"optimizer": FusedOptimizer("rowwise_adagrad", states=[torch.zeros(5, 4)])},
            "must be contiguous float32 [5]",
        ),
        (
            {"optimizer": FusedOptimizer("sgd", states=[torch.zeros(5)])},
            "optimizer sgd keeps 0 state(s) a table (1 here): expected 0 tensors, got 1",
        ),
        (
            {"tables": [overlapping[:5], overlapping[1:]], "feature_tables": [0], "optimizer": FusedOptimizer("sgd")},
            "table 0 and table 1 share memory",
        ),
        (
            {
                "tables": [torch.zeros(5, 4), torch.zeros(5, 4)],
                "feature_tables": [1],
                "optimizer": FusedOptimizer("rowwise_adagrad", states=[torch.zeros(5)] * 2),
            },
            "state 0 and state 1 share memory",
        ),
        ({"comm": "hsot"}, "comm must be 'fused', 'baseline', 'auto' or a backend"),
        ({"comm": "baseline", "require_fused": True}, "require_fused=True contradicts comm='baseline'"),
    ]
    for backend, (change, message) in itertools.product(BACKENDS, cases):
        with pytest.raises(ValueError, match=re.escape(message)):
            fused_ops.embedding_all_to_all(**{"comm": backend, **good, **change})


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
    with pytest.raises(ValueError, match=re.escape(message)):
        EmbeddingLayout(*arguments)


def test_layout_survives_an_operators_schema():
    layout = EmbeddingLayout([[4, 2], [], [3]], [[3, 7], [], [0]], [2, 0, 5], 9, torch.float16)
    assert EmbeddingLayout.decode(layout.encoded, torch.float16) == layout


@pytest.mark.parametrize("dims", [[], [4]])
def test_a_step_that_kernels_cannot_reach(dims):
    """A rank without tables counts its steps as well, and only the caller knows on which device."""
    layout = EmbeddingLayout.table_wise([dims], [2])
    tables, indices = [torch.zeros(5, dim) for dim in dims], torch.zeros(0, dtype=torch.int64)
    offsets = torch.zeros(2 * len(dims) + 1, dtype=torch.int64)
    where = (None, None, layout.encoded, layout.dtype, "sum", "error", 0, 1)
    inputs = EmbeddingInputs(tables, indices, offsets, *where)
    states = FusedOptimizer.make_states("adam", tables, "cpu")
    OptimizerInputs("adam", states, torch.ones(1), [1e-8, 0.9, 0.999]).check(inputs)
    states[-1] = FusedOptimizer.make_states("adam", [], "meta")[-1]
    with pytest.raises(ValueError, match="the adam step is on meta, indices on cpu"):
        OptimizerInputs("adam", states, torch.ones(1), [1e-8, 0.9, 0.999]).check(inputs)


def test_bad_optimizers():
    with pytest.raises(ValueError, match="kind must be one of sgd, adagrad, rowwise_adagrad, adam, got 'lamb'"):
        FusedOptimizer("lamb")
    with pytest.raises(ValueError, match="eps must not be negative"):
        FusedOptimizer(eps=-1.0)
    with pytest.raises(ValueError, match=r"betas must lie in \[0, 1\)"):
        FusedOptimizer("adam", betas=(0.9, 1.0))
