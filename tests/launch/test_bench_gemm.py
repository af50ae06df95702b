"""The GEMM operators' benchmarks: rows on two CPU ranks, the CUDA session with a stand-in for the device, limits by hand."""

import json

import pytest
import torch
import torch.distributed as dist

from launch.bench import __main__ as bench
from launch.bench import host_session, limits, operators, torch_symmetric
from launch.bench.all_gather_gemm import AllGatherGemmShape
from launch.bench.gemm_all_reduce import GemmAllReduceShape
from launch.bench.gemm_reduce_scatter import GemmReduceScatterShape
from launch.bench.limits import Rates, Traffic
from launch.bench.ranks import _block, positions
from launch.bench.settings import SettingsError, backends, parse, shapes
from launch.bench.variants import MOST_INPUTS, inputs_beyond
from tests.launch import fake_device
from tests.ranks import run_ranks

OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")
SIZES = ["m=[1,7]", "n=33", "k=65"]
SMALL = ["ranks=2", "rounds=1", "iterations=2", "warmup=1", "rotate=2"]
PHASES = ("forward", "forward_backward", "compute_alone", "exchange_alone")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["op=gemm_all_reduce", "m=[1,0]"], "m must be a whole number from 1 up, or a list of them, got '0'"),
        (["op=all_gather_gemm", "k=many"], "k must be a whole number"),
        (["op=gemm_all_reduce", "kib=3"], "kib=3: these are shapes of all_to_all, and op=gemm_all_reduce"),
        (["op=all_to_all", "m=3"], "m=3: these are shapes of gemm_all_reduce, gemm_reduce_scatter, all_gather_gemm"),
        (["op=gemm_all_reduce", "backends=unfused"], "backends must be one of baseline, host, auto"),
        (["op=gemm_all_reduce", "dtype=int8"], "dtype must be one of fp32, fp16, bf16"),
    ],
)
def test_bad_settings_are_one_clear_line(words, message):
    with pytest.raises(SettingsError, match=message):
        parse(words)


def test_columns_and_shapes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backends(parse(["op=gemm_all_reduce"])) == ["baseline", "host", "auto"]
    assert backends(parse(["op=gemm_all_reduce", "device=cuda"])) == [
        *("baseline", "baseline_one_shot", "baseline_two_shot", "cuda", "triton", "auto")
    ]
    assert backends(parse(["op=all_gather_gemm", "device=cuda"])) == [
        *("baseline", "baseline_torch_fused", "cuda", "triton", "auto")
    ]
    swept = shapes(parse(["op=gemm_reduce_scatter", "n=[2,3]", "k=5", "dtype=[fp32,bf16]"]))
    assert list(swept) == [
        GemmReduceScatterShape(m, n, 5, dtype) for dtype in ("fp32", "bf16") for n in (2, 3) for m in (1, 8, 64, 1024)
    ]


def check_rows(rows, dtype):
    """Every column and phase of M = 1 and 7; none of the sizes divides by the ranks."""
    expected = {(backend, phase) for backend in ("baseline", "host") for phase in PHASES}
    expected |= {("auto", "forward"), ("auto", "forward_backward")}
    for m in (1, 7):
        block = [row for row in rows if row["m"] == m]
        assert {(row["backend"], row["phase"]) for row in block} == expected
        assert len(block) == len(expected)
    for row in rows:
        assert (row["n"], row["k"], row["dtype"], row["link"]) == (33, 65, dtype, "CPU host")
        assert 0 < row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        if row["phase"] == "forward":
            assert row["limit_ms"] > 0
            assert "GFLOP/s" in row["limit"]
            assert "one rank's bytes" in row["limit"]


def test_rows_are_written(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what `auto` measures is not for later runs
    assert bench.main(["op=gemm_all_reduce", *SIZES, *SMALL, f"out={out}"]) == 0
    rows = json.loads(out.read_text())
    assert {row["op"] for row in rows} == {"gemm_all_reduce"}
    check_rows(rows, "fp32")


def host_rows(operator, *words):
    dist.init_process_group = lambda *_, **__: None  # the test has one already
    host_session.PRODUCT_SIZE = 64
    host_session.stream_rate = lambda read: 1e9
    settings = parse([f"op={operator}", *SIZES, *SMALL, *words])
    session, build = host_session.make(settings, dist.get_rank(), "", None), operators.load(operator).variants
    return [row for link, shape in positions(settings) for row in _block(session, settings, link, shape, build)]


@pytest.mark.parametrize(("operator", "dtype"), [("gemm_reduce_scatter", "bf16"), ("all_gather_gemm", "fp16")])
def test_rows(operator, dtype, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    rows, others = run_ranks(2, host_rows, operator, f"dtype={dtype}", env=env)
    check_rows(rows, dtype)
    times = ["ms", "p10_ms", "p90_ms"]  # the slowest rank's
    assert [[row[key] for key in times] for row in rows] == [[row[key] for key in times] for row in others]


def fake_rows(operator, *words):
    """(rows by phase and column, notes) of rank 0 with a stand-in for the device, where cuda's operator is the host's."""
    from launch.bench import cuda_rates, cuda_session

    fake_device._translate(operator)
    cuda_rates.PRODUCT_SIZE = 64
    cuda_session.exists = lambda backend, operator: backend != "triton"
    blocks, notes = fake_device.session_rows(
        [
            f"op={operator}",
            "device=cuda",
            "ranks=2",
            "ranks_per_gpu=2",
            "rounds=3",
            "warmup=1",
            "iterations=1",
            "budget_s=0.1",
            *words,
        ]
    )
    return dict(blocks), notes


@pytest.mark.parametrize("operator", OPERATORS)
def test_cuda_session(operator, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    all_reduce = operator == "gemm_all_reduce"
    columns = torch_symmetric.COLUMNS[:2] if all_reduce else torch_symmetric.COLUMNS[2:]
    words = ["m=[4,7]", "n=33", "k=65", f"backends=[baseline,{','.join(columns)},triton,auto]"]
    (blocks, notes), _ = run_ranks(2, fake_rows, operator, *words, timeout=120, env=env)
    expected = {("baseline", phase) for phase in PHASES} | {("auto", "forward"), ("auto", "forward_backward")}
    for m, rows in zip((4, 7), (blocks[0], blocks[1]), strict=True):
        assert {(row["backend"], row["phase"]) for row in rows} == expected
        assert {row["m"] for row in rows} == {m}
        for row in rows:
            if row["phase"] == "forward":
                assert row["limit_ms"] > 0
                assert row["limit"].startswith("max of ")
    assert f"no rows of triton: it has no {operator}" in notes
    for column in columns:
        assert any(note.startswith(f"no rows of {column} forward: rank 0: ") for note in notes)
    uneven = "rows that divide by the ranks only, and 7 by 2 do not"
    assert any(uneven in note for note in notes) == (not all_reduce)


def test_pinned_memory_has_no_rivals(tmp_path):
    words = ["m=4", "n=8", "k=8", "link=pinned", "backends=[baseline,baseline_one_shot,auto]"]
    (blocks, notes), _ = run_ranks(2, fake_rows, "gemm_all_reduce", *words, timeout=120)
    assert blocks[0] == []
    assert notes == [
        "no rows of baseline: NCCL cannot be made to go through pinned host memory",
        "no rows of baseline_one_shot: torch's symmetric memory is peer memory",
        "no rows of auto: NCCL cannot be made to go through pinned host memory",
    ]


def test_each_rank_has_its_part():
    reduce, gather = GemmAllReduceShape(5, 6, 7), AllGatherGemmShape(5, 6, 7)
    assert [reduce.sizes(rank, 2).input for rank in range(2)] == [(5, 4), (5, 3)]
    assert [reduce.sizes(rank, 2).weight for rank in range(2)] == [(6, 4), (6, 3)]
    assert [GemmReduceScatterShape(5, 6, 7).sizes(rank, 2).output for rank in range(2)] == [(3, 6), (2, 6)]
    assert [gather.sizes(rank, 4).input for rank in range(4)] == [(2, 7), (1, 7), (1, 7), (1, 7)]
    assert [gather.sizes(rank, 4).output for rank in range(4)] == [(5, 2), (5, 2), (5, 1), (5, 1)]


def test_what_all_ranks_must_do():
    flops, read = 2 * 5 * 6 * 7, (5 + 6) * 7 * 2
    assert GemmAllReduceShape(5, 6, 7, "bf16").traffic(4) == Traffic(
        read=read, written=4 * 60, sent=2 * 3 * 60, flops=flops
    )
    assert GemmReduceScatterShape(5, 6, 7, "bf16").traffic(4) == Traffic(
        read=read, written=60, sent=3 * 60, flops=flops
    )
    assert AllGatherGemmShape(5, 6, 7, "bf16").traffic(4) == Traffic(read=read, written=60, sent=3 * 70, flops=flops)


def test_products_or_bytes_whichever_take_longer():
    traffic = Traffic(read=10**6, written=10**6, flops=10**9)
    slow = limits.of_shared_memory(traffic, Rates(read=1e9, copy=1e9, flops=1e11))
    assert slow.ms == pytest.approx(10)
    assert slow.formula == (
        "max of 1 GFLOP at 100 GFLOP/s: 10 ms, and all ranks: 1 MB read at 1 GB/s + 1 MB written at 1 GB/s: 2 ms"
    )
    assert limits.of_shared_memory(traffic, Rates(read=1e9, copy=1e9, flops=1e13)).ms == pytest.approx(2)
    assert limits.of_host_memory(traffic, read=1e9, copy=1e9, flops=1e11).ms == pytest.approx(10)
    assert limits.of_host_memory(traffic, read=1e9, copy=1e9, flops=1e13).ms == pytest.approx(3)
    assert limits.of_own_link(2.0, 3.0, "GEMM").formula == "max of GEMM 2 ms and exchange 3 ms, each alone"


def test_inputs_outgrow_the_cache():
    assert inputs_beyond(cache_bytes=100, touched_bytes=30, least=4) == 7
    assert inputs_beyond(cache_bytes=100, touched_bytes=1000, least=4) == 4
    assert inputs_beyond(cache_bytes=100, touched_bytes=0, least=4) == MOST_INPUTS
    assert inputs_beyond(cache_bytes=0, touched_bytes=10, least=4) == 4
