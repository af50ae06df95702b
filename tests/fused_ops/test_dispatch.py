"""Which backend runs, and that nobody is left to guess."""

import logging

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import dispatch
from fused_ops.dispatch import choose
from tests.ranks import run_ranks


def counted() -> dict:
    found = fused_ops.counters()
    fused_ops.reset_counters()
    return found


def choices():
    x = torch.arange(4.0)
    expected = torch.cat([torch.arange(4.0).view(2, 2)[dist.get_rank()]] * 2)
    fused_ops.reset_counters()
    for comm, backend, reason in [
        ("fused", "host", "fused"),
        ("host", "host", "asked for"),
        ("baseline", "baseline", "asked for"),
    ]:
        assert torch.equal(fused_ops.all_to_all(x, comm=comm), expected)
        assert counted() == {("all_to_all", backend, reason): 1}
    leaf = x.clone().requires_grad_()
    fused_ops.all_to_all(leaf).sum().backward()
    assert counted() == {("all_to_all", "host", "fused"): 2}
    assert torch.equal(fused_ops.all_to_all(x, require_fused=True), expected)
    with pytest.raises(ValueError, match="contradicts"):
        fused_ops.all_to_all(x, comm="baseline", require_fused=True)
    with pytest.raises(ValueError, match=r"contradicts comm='auto', which may choose baseline: use comm='fused'"):
        fused_ops.all_to_all(x, comm="auto", require_fused=True)
    with pytest.raises(ValueError, match=r"comm must be .*'auto'.*host.*got 'hots'"):
        fused_ops.all_to_all(x, comm="hots")
    with pytest.raises(ValueError, match="'cuda' takes cuda tensors, got one on cpu"):
        fused_ops.all_to_all(x, comm="cuda")


def test_the_backend_asked_for_runs_and_is_counted():
    run_ranks(2, choices)


def test_an_operator_that_does_not_describe_its_calls_is_not_measured():
    with pytest.raises(ValueError, match="some_operator does not take comm='auto'"):
        choose("some_operator", "auto", False, torch.device("cpu"), None)


def no_compiler():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("fused_ops").addHandler(handler)
    x = torch.arange(2.0)
    for _ in range(3):
        assert fused_ops.all_to_all(x).tolist() == [float(dist.get_rank())] * 2
    ((operator, backend, reason), calls) = next(iter(counted().items()))
    assert (operator, backend, calls) == ("all_to_all", "baseline", 3)
    assert "C++17 compiler" in reason
    assert len(records) == 1, "the fallback is said once"
    assert "all_to_all runs on baseline" in records[0].getMessage()
    for options in ({"require_fused": True}, {"comm": "host"}):
        with pytest.raises(fused_ops.BackendUnavailableError, match=r"C\+\+17 compiler"):
            fused_ops.all_to_all(x, **options)


def test_without_a_compiler_baseline_runs_and_says_why(tmp_path):
    run_ranks(2, no_compiler, env={"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)})


def one_rank_without_compiler(folder):
    import os

    if dist.get_rank() == 1:
        os.environ["CXX"] = "no-such-compiler"
    fused_ops.all_to_all(torch.arange(2.0))
    ((_, backend, reason),) = fused_ops.counters()
    assert backend == "baseline"
    return reason


def test_ranks_fall_back_together_and_for_one_reason():
    reasons = run_ranks(2, one_rank_without_compiler, "")
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("rank 1: ")


def test_the_first_backend_that_takes_a_call_of_that_size_runs_it():
    assert dispatch._fused_backend("gemm_all_reduce", torch.device("cuda"), 64) == "cuda"
    assert dispatch._fused_backend("gemm_all_reduce", torch.device("cuda"), 65) == "triton"
    assert dispatch._fused_backend("all_gather_gemm", torch.device("cuda"), 1) == "triton"
    assert dispatch._fused_backend("embedding_all_to_all", torch.device("cuda"), 0) == "cuda"
