"""comm="auto": the faster backend, the same on every rank, measured once and remembered."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import exposed, policy, policy_cache, policy_timing
from fused_ops.errors import PeerAbortedError
from tests.fused_ops.embedding_reference import Case
from tests.ranks import run_ranks

X = torch.arange(8.0)


class Job:
    """What a job's rank sees of the policy: its cache directory, its measurements, its log."""

    def __init__(self, folder: Path) -> None:
        policy_cache.cache_dir = lambda: folder
        self.measured: list[dict[str, float]] = []
        self.said: list[str] = []
        self._measure = policy.measure
        policy.measure = self._counted
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())
        logging.getLogger("fused_ops").addHandler(handler)
        logging.getLogger("fused_ops").setLevel(logging.INFO)
        fused_ops.reset_counters()

    def _counted(self, *arguments):
        self.measured.append(self._measure(*arguments))
        return self.measured[-1]

    def clock(self, **times: float) -> None:
        """From now on this rank's measurements come out so."""
        self._measure = lambda *_: times


def slow_down(backend: str, operator: str = "all_to_all", seconds: float = 0.005) -> None:
    """That backend's forward sleeps first."""
    module = importlib.import_module(f"fused_ops.backends.{backend}.{operator}")
    forward = getattr(module, operator)

    def slow(*arguments):
        time.sleep(seconds)
        return forward(*arguments)

    setattr(module, operator, slow)


def exchanged(**options) -> str:
    """Exchange, check the result, and say which backend ran."""
    before = fused_ops.counters()
    output = fused_ops.all_to_all(X + 10 * dist.get_rank(), comm="auto", **options)
    half = X.view(2, 4)[dist.get_rank()]
    assert torch.equal(output, torch.cat([half, half + 10]))
    ((_, backend, reason),) = [key for key, calls in fused_ops.counters().items() if calls != before.get(key)]
    assert re.fullmatch(r"auto: \S+ ms against \S+ ms \((measured|from the cache)\)", reason), reason
    return backend


def one_is_slow(folder, slow, fast):
    job = Job(folder)
    slow_down(slow)
    assert [exchanged() for _ in range(3)] == [fast] * 3
    assert len(job.measured) == 1, "once for every call of its kind"
    assert job.measured[0][slow] > 5 > job.measured[0][fast]
    return job.said


@pytest.mark.parametrize(("slow", "fast"), [("host", "baseline"), ("baseline", "host")])
def test_the_faster_backend_runs_and_rank_0_says_so_once(slow, fast, tmp_path):
    said = run_ranks(2, one_is_slow, tmp_path, slow, fast)
    assert [len(lines) for lines in said] == [1, 0]
    shown = rf"auto: all_to_all \[2\^5 bytes a rank, .*\]: host .* ms, baseline .* ms -> {fast} \(measured\)"
    assert re.fullmatch(shown, said[0][0])


def clocks_differ(folder):
    job = Job(folder)
    if dist.get_rank() == 0:
        job.clock(host=1.0, baseline=2.0)
    else:
        job.clock(host=5.0, baseline=3.0)
    return exchanged()


def test_ranks_whose_clocks_differ_agree_on_what_is_faster_on_the_slowest_rank(tmp_path):
    assert run_ranks(2, clocks_differ, tmp_path) == ["baseline", "baseline"]


def kinds(folder):
    """Each of these is measured by itself; calls that differ in nothing that counts share one decision."""
    job = Job(folder)
    rank = dist.get_rank()
    calls = [
        {"input": torch.ones(64)},
        {"input": torch.ones(65 + 63)},
        {"input": torch.ones(128).int()},
        {"input": torch.ones(0)},
        {
            "input": torch.ones(2 + rank),
            "input_splits": [1, 1 + rank],
            "output_splits": [1, 1] if rank == 0 else [1, 2],
        },
    ]
    for number, call in enumerate(calls, 1):
        fused_ops.all_to_all(**call, comm="auto")
        assert len(job.measured) == number
    for call in [*calls, {"input": torch.ones(40)}, {"input": torch.ones(32, 2)}]:
        fused_ops.all_to_all(**call, comm="auto")
    assert len(job.measured) == len(calls)
    fused_ops.all_to_all(**calls[0], comm="auto", channel=1)
    assert len(job.measured) == len(calls)
    if dist.get_rank() == 0:
        assert re.search(r"channel 1\]: .*\(from the cache\)$", job.said[-1]), "each channel decides once"
    return sorted(json.loads((folder / "policy.json").read_text()))


def test_size_dtype_and_splits_are_measured_apart(tmp_path):
    names = run_ranks(2, kinds, tmp_path)[0]
    assert len(names) == 5
    assert any("given splits; 2^5 of load" in name for name in names), "4 and 6 values of 4 bytes, of all ranks"
    assert all("2 ranks on 1 x " in name and "shared memory against gloo" in name for name in names)


def a_job(folder, slow, version):
    job = Job(Path(str(folder).format(rank=dist.get_rank())))
    fused_ops.__version__ = version
    slow_down(slow)
    return exchanged(), len(job.measured), job.said


def test_a_second_job_reads_what_the_first_one_measured(tmp_path):
    assert [found[:2] for found in run_ranks(2, a_job, tmp_path, "host", "1.0")] == [("baseline", 1)] * 2
    again = run_ranks(2, a_job, tmp_path, "baseline", "1.0")
    assert [found[:2] for found in again] == [("baseline", 0)] * 2, "the cache answers, whatever is faster by now"
    assert "-> baseline (from the cache)" in again[0][2][0]
    other_version = run_ranks(2, a_job, tmp_path, "baseline", "1.1")
    assert [found[:2] for found in other_version] == [("host", 1)] * 2


@pytest.mark.parametrize("content", ["{", "[1]", '{"all_to_all": 3}', '{"all_to_all": {"host": "fast"}}', "\x00"])
def test_a_corrupt_cache_is_said_once_and_written_anew(content, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(policy_cache, "cache_dir", lambda: tmp_path)
    policy_cache._warn_once.cache_clear()
    (tmp_path / "policy.json").write_text(content)
    assert [policy_cache.read("all_to_all") for _ in range(2)] == [None, None]
    assert ["comm='auto' measures again" in line for line in caplog.messages] == [True]
    policy_cache.write("all_to_all", {"host": 1.0})
    assert policy_cache.read("all_to_all") == {"host": 1.0}


def test_ranks_measure_where_the_cache_is_corrupt(tmp_path):
    (tmp_path / "policy.json").write_text("{")
    assert [found[:2] for found in run_ranks(2, a_job, tmp_path, "host", "1.0")] == [("baseline", 1)] * 2
    assert [found[:2] for found in run_ranks(2, a_job, tmp_path, "host", "1.0")] == [("baseline", 0)] * 2


@pytest.mark.parametrize("of_rank_1", ["missing", "other"])
def test_ranks_whose_caches_differ_measure_and_agree(of_rank_1, tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    run_ranks(2, a_job, tmp_path / "{rank}", "host", "1.0")
    files = [folder / "policy.json" for folder in folders]
    assert files[0].read_text() == files[1].read_text()
    if of_rank_1 == "missing":
        files[1].unlink()
    else:
        ((name, times),) = json.loads(files[1].read_text()).items()
        files[1].write_text(json.dumps({name: {"host": times["baseline"], "baseline": times["host"]}}))
    found = run_ranks(2, a_job, tmp_path / "{rank}", "baseline", "1.0")
    assert [backend for backend, *_ in found] == ["host", "host"]
    assert [count for _, count, _ in found] == [1, 1]
    assert files[0].read_text() == files[1].read_text()


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(policy_cache, "cache_dir", lambda: tmp_path / "file")
    policy_cache._warn_once.cache_clear()
    for _ in range(2):
        policy_cache.write("all_to_all", {"host": 1.0})
    assert ["cannot be kept" in line for line in caplog.messages] == [True]


def _write_many(folder, writer):
    policy_cache.cache_dir = lambda: folder
    for number in range(20):
        policy_cache.write(f"{writer} {number}", {"host": 1.0})


def test_jobs_that_write_at_once_lose_nothing(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_many, args=(tmp_path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert len(json.loads((tmp_path / "policy.json").read_text())) == 80
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", "policy.lock"}


def rejections(folder):
    """At a first call and at a later one, for one rank's mistake and for ranks that disagree; then a good call works."""
    job = Job(folder)
    rank = dist.get_rank()
    start = time.monotonic()
    for known in (False, True):
        splits = {"input_splits": [4, 4 + rank], "output_splits": [4, 4]}
        with pytest.raises(
            ValueError if rank else PeerAbortedError, match="input_splits sum to 9, but input has 8 rows"
        ):
            fused_ops.all_to_all(X, comm="auto", **splits)
        with pytest.raises(ValueError, match="ranks disagree"):
            fused_ops.all_to_all(torch.ones(8 if rank == 0 else 1024), comm="auto")
        assert len(job.measured) == known
        job.clock(host=1.0, baseline=2.0)
        assert exchanged() == "host"
    assert time.monotonic() - start < 20


def test_an_error_on_one_rank_reaches_the_others(tmp_path):
    run_ranks(2, rejections, tmp_path)


def recorded_on_rank_1(folder):
    job = Job(folder)

    def check_errors(_):
        if dist.get_rank() == 1:
            raise ValueError("index 7 is out of range")

    policy.check_errors, real = check_errors, policy.check_errors
    with pytest.raises(ValueError if dist.get_rank() == 1 else PeerAbortedError, match="index 7 is out of range"):
        exchanged()
    policy.check_errors = real
    assert not job.measured
    exchanged()


def test_what_a_kernel_recorded_on_one_rank_reaches_the_others(tmp_path):
    run_ranks(2, recorded_on_rank_1, tmp_path)


def gradients(folder, choice):
    job = Job(folder)
    job.clock(**{"host": 2.0, "baseline": 2.0, choice: 1.0})
    rank, world = dist.get_rank(), dist.get_world_size()
    leaf = X.clone().requires_grad_()
    fused_ops.all_to_all(leaf, comm="auto").backward(torch.arange(8.0) + rank)
    half = torch.arange(8.0).view(2, 4)[rank]
    assert torch.equal(leaf.grad, torch.cat([half, half + 1]))
    assert len(job.measured) == 1, "backward exchanges as much as forward did"
    for seed in range(12):
        case = Case.random(seed, world)
        fused_ops.reset_counters()
        result = case.run(rank, comm="auto")
        phases = {operator: backend for operator, backend, reason in fused_ops.counters() if "auto" in reason}
        assert set(phases.values()) == {choice}
        assert len(phases) == 3, "forward, the exchange of gradients, and one of the two that stay on their rank"
        case.check(rank, result)
        assert result.equals(case.run(rank, comm=choice))


@pytest.mark.parametrize("choice", ["host", "baseline"])
def test_backward_runs_where_forward_ran_and_is_right(choice, tmp_path):
    run_ranks(2, gradients, tmp_path, choice)


def bad_index(folder):
    job = Job(folder)
    rank = dist.get_rank()
    layout = fused_ops.EmbeddingLayout.table_wise([[4], [4]], [1, 1])

    def look_up(index):
        table = torch.ones(5, 4)
        return fused_ops.embedding_all_to_all([table], torch.tensor([0, index]), torch.arange(3), layout, comm="auto")

    for known in (False, True):
        with pytest.raises(
            ValueError if rank == 0 else PeerAbortedError, match=r"index 9 .* is out of range for table 0"
        ):
            look_up(4 if rank else 9)
        assert len(job.measured) == known
        job.clock(host=1.0, baseline=2.0)
        assert look_up(4).shape == (1, 8)


def test_a_bad_index_on_one_rank_reaches_the_others(tmp_path):
    run_ranks(2, bad_index, tmp_path)


def compiled(folder, choice):
    job = Job(folder)
    job.clock(**{"host": 2.0, "baseline": 2.0, choice: 1.0})
    world = dist.get_world_size()
    layout = fused_ops.EmbeddingLayout.table_wise([[4]] * world, [2] * world)
    table = torch.randn(5, 4, requires_grad=True)
    assert layout.encoded, "made before compiling: Dynamo cannot enter the lock of Python 3.11's cached_property"

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(table):
        indices, offsets = torch.arange(2 * world) % 5, torch.arange(2 * world + 1)
        pooled = fused_ops.embedding_all_to_all(
            [table], indices, offsets, layout, comm="auto", average_over_ranks=False
        )
        return fused_ops.all_to_all(pooled, comm="auto").sum()

    for _ in range(2):
        table.grad = None
        step(table).backward()
        assert torch.equal(table.grad, torch.tensor([1.0, 1, 1, 1, 0])[:, None].expand(5, 4))
    assert len(job.measured) == 2
    assert {backend for _, backend, reason in fused_ops.counters() if "auto" in reason} == {choice}


@pytest.mark.parametrize("choice", ["host", "baseline"])
def test_a_compiled_function_decides_when_it_runs(choice, tmp_path):
    run_ranks(2, compiled, tmp_path, choice, timeout=120)


def backward_alone():
    layout = fused_ops.EmbeddingLayout.table_wise([[4]] * 2, [1] * 2)
    lookups = (torch.zeros(2).long(), torch.arange(3), None, None, layout.encoded, layout.dtype, "sum", "error")
    where = (dist.group.WORLD.group_name, 0, "auto", False)
    with pytest.raises(ValueError, match=r"measured no forward of .*a backward runs where its forward ran"):
        torch.ops.fused_ops.embedding_all_to_all_gradient(torch.ones(1, 8), [torch.ones(5, 4)], *lookups, False, *where)


def test_a_backward_without_a_forward_is_refused():
    run_ranks(2, backward_alone)


def exposed_ms(folder):
    """Rank 0 waits in baseline's exchange for rank 1, which sleeps before each."""
    Job(folder)
    if dist.get_rank() == 1:
        slow_down("baseline", seconds=0.05)
    fused_ops.exposed_wait_ms()
    exposed.add_ns(7_000_000)
    assert exchanged() == "host"
    return fused_ops.exposed_wait_ms()


def test_the_measurement_is_not_exposed_communication(tmp_path):
    assert all(7 <= ms < 40 for ms in run_ranks(2, exposed_ms, tmp_path))


def no_compiler(folder):
    job = Job(folder)
    for _ in range(2):
        fused_ops.all_to_all(X, comm="auto")
    ((_, backend, reason),) = fused_ops.counters()
    assert (backend, job.measured, len(job.said)) == ("baseline", [], 1)
    assert "C++17 compiler" in reason
    assert "all_to_all runs on baseline" in job.said[0]


def test_without_a_fused_backend_baseline_runs_unmeasured(tmp_path):
    run_ranks(2, no_compiler, tmp_path, env={"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)})


def test_nothing_new_is_measured_inside_a_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = policy.Call("2^5 bytes a rank", torch.float32, 0, run=lambda backend: pytest.fail("it ran"))
    with pytest.raises(
        ValueError, match=r"all_to_all: .*\[2\^5 bytes a rank\].*call the operator once .* before capturing"
    ):
        policy.decide("all_to_all", {"cuda": policy}, torch.device("cuda"), None, call)


def test_runs_take_turns_and_short_ones_are_timed_in_batches():
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("host", "baseline")}
    times = policy_timing.measure(runs, torch.device("cpu"), 0.5)
    assert set(times) == {"host", "baseline"}
    assert calls.count("host") == calls.count("baseline") == 1 + policy_timing.ROUNDS * (1 + 4)
    turns = [name for name, before in zip(calls[2:], ["", *calls[2:]], strict=False) if name != before]
    assert len(turns) == policy_timing.ROUNDS + 1, "each round begins with the one that ended the last"
    calls.clear()
    policy_timing.measure(runs, torch.device("cpu"), 1000.0)
    assert calls.count("host") == 1 + policy_timing.ROUNDS_OF_SLOW * 2


def test_a_bucket_holds_what_rounds_up_to_one_power_of_two():
    assert [policy.bucket(count, "B") for count in (0, 1, 2, 3, 4, 5)] == [
        "0 B",
        "2^0 B",
        "2^1 B",
        "2^2 B",
        "2^2 B",
        "2^3 B",
    ]


@pytest.mark.gpu
def test_on_a_gpu_a_captured_graph_replays_what_was_chosen_before(tmp_path):
    run_ranks(2, captured, tmp_path, timeout=240)


def captured(folder):
    job = Job(folder)
    job.clock(cuda=1.0, baseline=2.0)
    x = torch.full((8,), float(dist.get_rank()), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with (
            pytest.raises(ValueError, match="before capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        ):
            fused_ops.all_to_all(x, comm="auto")
        for _ in range(2):
            fused_ops.all_to_all(x, comm="auto")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = fused_ops.all_to_all(x, comm="auto")
        graph.replay()
    torch.cuda.synchronize()
    assert output.tolist() == [0.0] * 4 + [1.0] * 4
    assert len(job.measured) == 1
