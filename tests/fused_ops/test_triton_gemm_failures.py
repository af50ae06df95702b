"""What goes wrong in the GEMM operators in Triton: nobody waits for ever, and every rank says what happened."""

import time

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import PeerAbortedError, PeerTimeoutError
from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from tests.fused_ops.gemm_reference import rank_and_world
from tests.fused_ops.test_triton_gemm import in_two_phases
from tests.fused_ops.triton_ranks import DEVICES, run_triton_ranks

pytestmark = pytest.mark.parametrize("device", DEVICES)


def refused(call, *arguments, **options):
    """The error of a call, raised at once or when the kernels' record is read."""
    try:
        call(*arguments, comm="triton", **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        fused_ops.check_errors()
    except Exception as error:
        return error
    return None


def each_operator(device, columns):
    """Calls that work, by operator."""
    _, world = rank_and_world()
    factors = torch.ones(6, 3, device=device), torch.ones(columns, 3, device=device)
    return [
        (gemm_reduce_scatter, factors, {}),
        (gemm_all_reduce, factors, {}),
        (all_gather_gemm, (factors[0][: 6 // world], factors[1]), {"total_rows": 6 // world * world}),
    ]


def rejections(device):
    """A rank that rejects its input, or has made another call: the peers' kernels, which run by then, end and say why."""
    rank, world = rank_and_world()
    in_two_phases()
    for operator, arguments, options in each_operator(device, 5):
        assert refused(operator, *arguments, **options) is None
        bad = arguments[0].double() if rank == 0 else arguments[0]
        error = refused(operator, bad, arguments[1], **options)
        assert type(error) is (ValueError if rank == 0 else PeerAbortedError), repr(error)
        assert "must be one of" in str(error)
        output = operator(*arguments, **options, comm="triton")
        fused_ops.check_errors()
        assert (output == (3 if operator is all_gather_gemm else 3 * world)).all()
    other = gemm_reduce_scatter if rank == 0 else gemm_all_reduce
    error = refused(other, *each_operator(device, 5)[0][1])  # both are known by now: the kernels notice
    assert isinstance(error, (ValueError, PeerAbortedError))
    assert "disagree" in str(error) or "gave up" in str(error)
    assert refused(gemm_reduce_scatter, *each_operator(device, 5)[0][1]) is None


def test_rejected_input_and_disagreement_end_the_peers_kernels(device):
    run_triton_ranks(2, device, rejections)


def late_peer(device, which):
    rank, _ = rank_and_world()
    in_two_phases()
    operator, arguments, options = each_operator(device, 5)[which]
    assert refused(operator, *arguments, **options) is None
    fused_ops.set_timeout(1.0)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return
    start = time.monotonic()
    output = operator(*arguments, **options, comm="triton")
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - start < 6  # interpreted kernels are slow
    assert output.isnan().all()
    with pytest.raises(PeerTimeoutError, match=r"waited 1 s; ranks that did not arrive: \[1\]"):
        fused_ops.check_errors()
    with pytest.raises(PeerTimeoutError, match="broken since"):
        operator(*arguments, **options, comm="triton")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_peer_that_does_not_come_is_named(device, which):
    run_triton_ranks(2, device, late_peer, which)
