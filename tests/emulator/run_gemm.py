"""Emulated runs of GEMM + AllReduce: `python -m tests.emulator.run_gemm problems:2:peer:one_phase:12:1 mixed`. As `run`."""

from __future__ import annotations

import ctypes
import itertools
import sys
from unittest import mock

import torch

from fused_ops.backends.cuda import all_to_all
from fused_ops.backends.cuda import gemm_all_reduce as backend
from fused_ops.gemm_inputs import GemmInputs
from fused_ops.symmetric.agreement import BAD_TAG, REJECTED, TIMEOUT
from tests.emulator.channel import library, together
from tests.emulator.gemm_problems import Problem, channels, draw, gemm_backend, no_failure, run

ONE_PHASE_BYTES = {"one_phase": 1 << 30, "two_phases": 0}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Problem(4, 40, (64, 48, 0, 8), ("rows",) * 4, BF16, True, 1)


def problems(ranks: str, link: str, phases: str, count: str, schedule: str) -> None:
    """Everything equals float64, and all ranks have the same bits."""
    library().emulator_shuffle(int(schedule))
    lanes = channels(int(ranks), link)
    with gemm_backend(lanes, ONE_PHASE_BYTES[phases]):
        for problem in draw(int(ranks), int(count), int(schedule)):
            problem.check(run(problem, lanes))


def large(phases: str) -> None:
    """The input in several slabs; several tiles a block; nothing at all of some dimension."""
    kinds = ("rows", "columns")
    lanes = channels(2, "peer")
    with gemm_backend(lanes, ONE_PHASE_BYTES[phases]):
        for problem in (
            Problem(64, 24, (1100, 2000), kinds, BF16, True, 1),
            Problem(8, 8, (7000, 24), kinds, FP16, False, 2),
            Problem(40, 16, (600, 1300), kinds, FP32, False, 3),
            Problem(64, 1400, (8, 8), kinds, BF16, False, 4),
            Problem(1, 2400, (8, 16), kinds, FP16, True, 5),
            Problem(5, 1300, (4, 4), kinds, FP32, True, 6),
            Problem(5, 16, (0, 0), kinds, BF16, True, 7),
            Problem(0, 16, (8, 8), kinds, BF16, True, 8),
            Problem(3, 0, (8, 8), kinds, BF16, True, 9),
        ):
            problem.check(run(problem, lanes))


def repeatable() -> None:
    """The same bits whatever runs first, and in either number of phases."""
    for problem in itertools.islice(draw(4, 11, 5), 7, None):
        found = []
        for schedule, phases in ((0, "one_phase"), (1, "two_phases"), (2, "two_phases")):
            library().emulator_shuffle(schedule)
            lanes = channels(4, "peer")
            lanes[schedule].set_stress_delay(200, 0)
            with gemm_backend(lanes, ONE_PHASE_BYTES[phases]):
                found.append(run(problem, lanes)[0])
        assert torch.equal(found[0], found[1]), problem
        assert torch.equal(found[0], found[2]), problem


def mixed() -> None:
    """Between exchanges on the same channel, which post credits ahead; each half of the packets' memory is used again."""
    lanes = channels(4, "peer")
    with (
        gemm_backend(lanes, 0),
        mock.patch.object(all_to_all, "cuda_channel", lambda group, i, device: lanes[group.rank]),
    ):
        for number in range(4):
            inputs = [torch.arange(8.0) + 10 * rank + 100 * number for rank in range(4)]
            received = together(lambda r: all_to_all.all_to_all(inputs[r], None, None, lanes[r].group, 0), 4)  # noqa: B023
            no_failure(lanes)
            for rank, got in enumerate(received):
                want = torch.cat([other[2 * rank : 2 * rank + 2] for other in inputs])
                assert torch.equal(got, want), (number, rank)
            for problem in itertools.islice(draw(4, 2, number), number % 2, None):
                problem.check(run(problem, lanes))


def two_in_flight() -> None:
    """On two channels at once."""
    lanes = [channels(4, "peer"), channels(4, "peer")]
    first, second = SMALL, Problem(17, 96, (40, 40, 40, 40), ("columns",) * 4, FP16, False, 2)
    with gemm_backend(lanes[0], 0, lanes[1]):
        inputs = [[problem.inputs(rank) for rank in range(4)] for problem in (first, second)]

        def both(r: int) -> tuple:
            return tuple(backend.gemm_all_reduce(*inputs[i][r], lanes[i][r].group, i) for i in (1, 0))

        outputs = together(both, 4)
    no_failure([*lanes[0], *lanes[1]])
    second.check([mine[0] for mine in outputs])
    first.check([mine[1] for mine in outputs])


def one_after_another() -> None:
    """Calls of changing shapes on one channel and stream, of which a rank may be in the second while a peer is in the first."""
    library().emulator_shuffle(1)
    library().emulator_slow.argtypes = [ctypes.c_void_p]
    small, large = (Problem(rows, 40, (8, 0), ("rows",) * 2, FP32, True, rows) for rows in (1, 64))
    problems = [small, large, *draw(2, 1, 12), small, large]  # small before large at odd and even epochs
    for phases, slow in itertools.product(ONE_PHASE_BYTES.values(), (None, 2)):
        lanes = channels(2, "peer")
        library().emulator_slow(slow)
        for lane in lanes:
            lane.stream = lane.rank + 1
        with gemm_backend(lanes, phases, half_bytes=1 << 20):
            inputs = [[problem.inputs(rank) for rank in range(2)] for problem in problems]

            def all_of_them(r: int) -> list[torch.Tensor]:
                return [backend.gemm_all_reduce(*mine[r], lanes[r].group, 0) for mine in inputs]  # noqa: B023

            outputs = together(all_of_them, 2)
            no_failure(lanes)
        for number, problem in enumerate(problems):
            problem.check([mine[number] for mine in outputs])
    library().emulator_slow(None)


def alone() -> None:
    """A group of one, whose blocks run one after the other: the first does the work of all."""
    lanes = channels(1, "peer")
    with gemm_backend(lanes, 0):
        for problem in draw(1, 13, 3):
            outputs = [backend.gemm_all_reduce(*problem.inputs(0), lanes[0].group, 0)]
            no_failure(lanes)
            problem.check(outputs)


def absent(phases: str) -> None:
    """The last rank makes no call: the others' kernels end, say who is missing, and poison their outputs."""
    lanes = channels(4, "peer", timeout_s=2.0)  # by the emulator's clock
    with gemm_backend(lanes, ONE_PHASE_BYTES[phases]):
        outputs = run(SMALL, lanes, ranks=3, check=False)
        for lane, output in zip(lanes, outputs, strict=False):
            assert lane.record.serial, lane.rank
            assert (lane.record.code, lane.record.late) == (TIMEOUT, 1 << 3), (lane.record.code, lane.record.late)
            assert torch.isnan(output).all(), lane.rank
            lane.record.serial = 0
        outputs = run(SMALL, lanes, ranks=3, check=False)  # the channel is broken: at once, and again poison
        assert all(
            lane.record.serial and torch.isnan(output).all() for lane, output in zip(lanes, outputs, strict=False)
        )


def rejected(phases: str) -> None:
    """One rank rejects its input: all others name it, and the next call is right again."""
    for schedule in (1, 3):
        library().emulator_shuffle(schedule)
        lanes, culprit = channels(4, "peer"), schedule
        lanes[culprit].set_stress_delay(2000, 0)  # which some hear of late
        with gemm_backend(lanes, ONE_PHASE_BYTES[phases]):
            run(SMALL, lanes)
            outputs = run(SMALL, lanes, check=False, culprit=culprit)
            for lane, output in zip(lanes, outputs, strict=True):
                if lane.rank == culprit:
                    continue
                found = (lane.record.code, lane.record.peer)
                assert found == (REJECTED, culprit), (schedule, lane.rank, found)
                assert torch.isnan(output).all()
                lane.record.serial = 0
                lane._clear_halt()
            SMALL.check(run(SMALL, lanes))


def disagree() -> None:
    """Ranks that come with different numbers of rows, which their hosts have not noticed."""
    lanes = channels(4, "peer", timeout_s=5.0)
    with gemm_backend(lanes, 0):
        wrong = Problem(5, *list(vars(SMALL).values())[1:])
        outputs = run(SMALL, lanes, check=False, instead={2: wrong})
        for lane, output in zip(lanes, outputs, strict=True):
            assert lane.record.code in (BAD_TAG, REJECTED), (lane.rank, lane.record.code)
            assert torch.isnan(output).all()
        assert any(lane.record.code == BAD_TAG for lane in lanes)


def overrun() -> None:
    """A bias that is shorter than the kernels are told."""
    lanes = channels(4, "peer")
    inputs = [SMALL.inputs(rank) for rank in range(4)]
    short = [bias[:-1].clone() for _, _, bias in inputs if bias is not None]

    def unchecked(_, input, weight, bias, leading):  # type: ignore[no-untyped-def]
        return GemmInputs(input, weight, bias)

    with gemm_backend(lanes, 0), mock.patch.object(GemmInputs, "checked", unchecked):
        together(lambda r: backend.gemm_all_reduce(*inputs[r][:2], short[r], lanes[r].group, 0), 4)


RUNS = (
    problems,
    large,
    repeatable,
    mixed,
    two_in_flight,
    one_after_another,
    alone,
    absent,
    rejected,
    disagree,
    overrun,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    by_name = {scenario.__name__: scenario for scenario in RUNS}
    for said in sys.argv[1:]:
        name, *arguments = said.split(":")
        by_name[name](*arguments)
