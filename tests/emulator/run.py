"""One emulated run: `python -m tests.emulator.run problems peer 1 0`. With the sanitizers' libraries loaded first."""

from __future__ import annotations

import sys
from unittest import mock

import torch

from fused_ops import EmbeddingLayout
from fused_ops.backends.cuda import embedding_all_to_all as forward
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric import cuda_channel
from fused_ops.symmetric.agreement import REJECTED
from tests.emulator.channel import EmulatedChannel, World, allow, backend_of, library, together
from tests.emulator.problems import CPU, check, draw, inputs_of, optimizer_of

RANKS = 4
NO_OPTIMIZER = OptimizerInputs("none", [], None, [])


def channels(link: str, timeout_s: float = 60.0) -> list[EmulatedChannel]:
    world = World(RANKS, link)
    return [EmulatedChannel(world, rank, timeout_s) for rank in range(RANKS)]


def problems(link: str, every: str, schedule: str) -> None:
    """Everything equals float64. Parts small enough for slices; one call twice, so that credits are posted ahead."""
    library().emulator_shuffle(int(schedule))
    lanes, chosen = channels(link), list(draw(RANKS))[:: int(every)]
    with mock.patch.object(cuda_channel, "SLICE_BYTES", 1 << 11):
        for problem in [*chosen, chosen[0]]:
            check(problem, lanes)


def overrun() -> None:
    """The kernels are told of a batch one sample longer than the gradient that they read."""
    lanes, problem = channels("peer"), next(draw(RANKS))
    mine = [problem.owned(rank, CPU) for rank in range(RANKS)]
    inputs = [inputs_of(problem, mine[rank], rank) for rank in range(RANKS)]
    grads = [owned.grad[:-1].clone() for owned in mine]
    with backend_of(lanes), mock.patch("fused_ops.embedding_inputs.EmbeddingInputs.check_gradient"):
        together(lambda r: forward.embedding_all_to_all_gradient(grads[r], inputs[r], True, lanes[r].group, 0), RANKS)


def absent() -> None:
    """The last rank makes no call: the others' kernels end, say who is missing, and poison their outputs."""
    lanes, problem = channels("peer", timeout_s=0.5), next(draw(RANKS))
    mine = [problem.owned(rank, CPU) for rank in range(RANKS)]
    inputs = [inputs_of(problem, mine[rank], rank) for rank in range(RANKS)]
    with backend_of(lanes):
        outputs = together(
            lambda r: forward.embedding_all_to_all(inputs[r], optimizer_of(problem, mine[r]), lanes[r].group, 0),
            RANKS - 1,
        )
    for lane, output in zip(lanes, outputs, strict=False):
        assert lane.record.serial, lane.rank
        assert (lane.record.code, lane.record.late) == (1, 1 << RANKS - 1), (lane.record.code, lane.record.late)
        assert torch.isnan(output).all(), lane.rank


def bad_offsets() -> None:
    """Whatever bag an offset is wrong for, and however it is wrong, the call fails and says which."""
    length = 2**32
    for dim, offsets, position in [
        (128, [0, -5, 20], 1),  # the first bag of one group of lanes
        (8, [0] + [-5] + [20] * 8, 1),  # of several groups
        (8, [0, 1, 2, 10, 5, 20, 20, 20, 20, 20], 4),  # of a group that begins rightly
        (128, [0, 3, length + 5, 7, 20], 2),  # right but for bits that an int has not
        (128, [0, 3, 2 * length, 2 * length, 20], 2),
        (8, [0, 9, 3, 20], 2),
        (128, [0, 9, 3, 20], 2),
    ]:
        world, batch = World(1, "peer"), len(offsets) - 1
        lane = EmulatedChannel(world, 0, 60.0)
        layout = EmbeddingLayout.table_wise([[dim]], [batch], torch.float32)
        lookups = (
            [torch.ones(50, dim)],
            torch.arange(20),
            torch.tensor(offsets),
            None,
            None,
            layout.encoded,
            layout.dtype,
        )
        inputs = EmbeddingInputs(*lookups, "sum", "error", 0, 1)
        with backend_of([lane]):
            together(lambda r: forward.embedding_all_to_all(inputs, NO_OPTIMIZER, lane.group, 0), 1)  # noqa: B023
        found = (lane.record.code, lane.record.bad_position)
        assert found == (cuda_channel.BAD_OFFSET, position), (dim, offsets, found)


def rejected(link: str) -> None:
    """One rank rejects its input: all others name it."""
    problem = next(draw(RANKS))
    for schedule in range(RANKS):
        library().emulator_shuffle(schedule)
        lanes, culprit = channels(link), schedule % RANKS
        lanes[culprit].set_stress_delay(2000, 0)  # which some hear of late
        mine = [problem.owned(rank, CPU) for rank in range(RANKS)]
        inputs = [inputs_of(problem, mine[rank], rank) for rank in range(RANKS)]

        def good(r: int) -> object:
            return forward.embedding_all_to_all(inputs[r], optimizer_of(problem, mine[r]), lanes[r].group, 0)  # noqa: B023

        def bad(r: int) -> object:
            if r != culprit:  # noqa: B023
                return good(r)
            with lanes[r].call(OPERATOR):  # noqa: B023
                return lanes[r]._reject()  # noqa: B023

        with backend_of(lanes):
            for _ in range(3):  # from the third on, credits are posted ahead: peers wait for data
                together(good, RANKS)
            arena = lanes[culprit].arenas.newest
            allow(
                arena.base, len(arena.slots) * arena.slot_size
            )  # peers store to the slot posted ahead, whatever comes of it
            together(bad, RANKS)
        found = [(lane.record.code, lane.record.peer) for lane in lanes if lane.rank != culprit]
        assert found == [(REJECTED, culprit)] * (RANKS - 1), (schedule, culprit, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN, or the largest integer
    {"problems": problems, "overrun": overrun, "absent": absent, "rejected": rejected, "bad_offsets": bad_offsets}[
        sys.argv[1]
    ](*sys.argv[2:])
