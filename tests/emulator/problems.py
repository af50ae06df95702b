"""Calls of the embedding operator on emulated ranks, each part against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fused_ops import EmbeddingLayout
from fused_ops.backends.cuda import embedding_all_to_all as forward
from fused_ops.backends.cuda import embedding_update as backward
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from tests.emulator.channel import EmulatedChannel, backend_of, together
from tests.stress.embedding_problems import OPTIMIZERS, Owned, Problem

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# How many of 16 bytes a lane has of a row: one; two; four, beside a table too wide for that; rows that are not aligned.
ONE_VECTOR, TWO_VECTORS, FOUR_AND_WIDER, ANY = [64, 8], [256, 16], [512, 1024], [12, 5]  # in fp32


def draw(ranks: int = 4) -> Iterator[Problem]:
    """Every dtype and optimizer, with rows of all kinds and a rank without tables; hot rows and cold ones."""
    for number, (dtype, optimizer) in enumerate(itertools.product(DTYPES, OPTIMIZERS)):
        scale = 4 // dtype.itemsize
        rows_of = [ONE_VECTOR, [dim * scale for dim in TWO_VECTORS], [dim * scale for dim in FOUR_AND_WIDER]]
        dims = [*rows_of[:2], ANY if number % 2 else rows_of[2], []]  # `ANY` misaligns the columns of all
        batches = [(5, 5, 5, 5), (3, 0, 37, 1), (1, 20, 0, 0)][number % 3]
        # Rows that lie within a unit of sorted lookups, that fill many, and that reach from one into the next.
        rows, longest_bag = [(400, 9), (1, 60), (3, 9)][number % 3]
        layout = EmbeddingLayout.table_wise(dims[:ranks], batches[:ranks], dtype)
        yield Problem(layout, ["sum", "mean"][number % 2], optimizer, number, rows, longest_bag, number % 4 > 1)


def inputs_of(problem: Problem, mine: Owned, rank: int) -> EmbeddingInputs:
    layout = problem.layout
    lookups = (mine.tables, mine.indices, mine.offsets, mine.weights, None, layout.encoded, layout.dtype)
    return EmbeddingInputs(*lookups, problem.pooling, "error", rank, layout.world)


def optimizer_of(problem: Problem, mine: Owned) -> OptimizerInputs:
    made = problem.optimizer_of(mine)
    return OptimizerInputs(made.kind, made.states, made.learning_rate_tensor, made.constants)


def check(problem: Problem, channels: list[EmulatedChannel]) -> None:
    """Forward, backward and update of all ranks."""
    ranks = range(problem.layout.world)
    everyone = [problem.owned(rank, CPU) for rank in ranks]
    mine = [owned.copy() for owned in everyone]
    inputs = [inputs_of(problem, mine[rank], rank) for rank in ranks]
    optimizers = [optimizer_of(problem, owned) for owned in mine]
    with backend_of(channels):
        exchange(problem, channels, inputs, optimizers, everyone)
        gradients = together(
            lambda r: forward.embedding_all_to_all_gradient(mine[r].grad, inputs[r], True, channels[r].group, 0),
            len(ranks),
        )
        no_failure(channels)
        for rank in ranks:
            where, given = (channels[rank].group, 0), (*gradients[rank], inputs[rank])
            wanted = list(range(len(mine[rank].tables)))
            *dense, _ = backward.embedding_gradients(*given, wanted, False, *where)
            weights = backward.embedding_update(*given, optimizers[rank], problem.weighted, *where)
            check_gradients(problem, rank, everyone, dense, weights)
            expected = [tensor for kind in problem.expected_update(rank, everyone) for tensor in kind]
            for got, want in zip(mine[rank].changed(), expected, strict=True):
                problem.check(got, want, f"table or state of rank {rank}")


def exchange(
    problem: Problem,
    channels: list[EmulatedChannel],
    inputs: list[EmbeddingInputs],
    optimizers: list[OptimizerInputs],
    everyone: list[Owned],
) -> None:
    """The fused forward, and the lookups alone."""
    outputs = together(
        lambda r: forward.embedding_all_to_all(inputs[r], optimizers[r], channels[r].group, 0), len(channels)
    )
    no_failure(channels)
    for rank, output in enumerate(outputs):
        problem.check(output, problem.expected_output(rank, everyone), f"output of rank {rank}")
        pooled = forward.pooled_locally(inputs[rank], channels[rank].group)
        parts = [problem._pooled(everyone[rank], f) for f in range(len(everyone[rank].tables))]
        if parts:
            problem.check(pooled, torch.cat(parts, dim=1), f"lookups of rank {rank}")


def check_gradients(problem: Problem, rank: int, everyone: list[Owned], dense: list[Tensor], weights: Tensor) -> None:
    """Of the tables, and of the weights where there are any."""
    owned = everyone[rank]
    grads = torch.cat([other.grad for other in everyone]).double() / problem.layout.world
    of_weights = [torch.zeros(0, dtype=torch.float64)]
    for t, table in enumerate(owned.tables):
        column = problem.layout.feature_columns[rank][t]
        rows, bags, factors = problem._lookups(owned, t)
        arrived = grads[bags, column : column + table.shape[1]]
        want = torch.zeros(table.shape, dtype=torch.float64).index_add_(0, rows, arrived * factors[:, None])
        problem.check(dense[t], want, f"gradient of table {t} of rank {rank}")
        lengths = torch.bincount(bags, minlength=problem.layout.global_batch)[bags]
        scales = 1 / lengths if problem.pooling == "mean" else torch.ones(len(bags))
        of_weights.append((arrived * table.double()[rows]).sum(1) * scales)
    if problem.weighted:
        problem.check(weights, torch.cat(of_weights), f"gradient of the weights of rank {rank}")


def no_failure(channels: list[EmulatedChannel]) -> None:
    for channel in channels:
        record = channel.record
        assert record.serial == 0, f"rank {channel.rank}: code {record.code}, phase {record.phase}, peer {record.peer}"
