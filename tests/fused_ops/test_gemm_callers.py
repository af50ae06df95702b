"""What a model's code does around the GEMM operators: autocast, changes in place, second derivatives, meta tensors."""

import pytest
import torch

import fused_ops
from tests.ranks import run_ranks

COMMS = ("host", "baseline")


def factors(columns=8, rows=6):
    torch.manual_seed(torch.distributed.get_rank())
    return torch.randn(rows, columns, requires_grad=True), torch.randn(5, columns, requires_grad=True)


def calls(input, weight, comm):
    yield fused_ops.gemm_all_reduce(input, weight, comm=comm)
    yield fused_ops.gemm_reduce_scatter(input, weight, comm=comm)
    yield fused_ops.all_gather_gemm(input, weight, comm=comm)


def under_autocast(rows):
    for comm in COMMS:
        input, weight = factors(rows=rows)
        plain = [output.detach() for output in calls(input, weight, comm)]
        with torch.autocast("cpu", torch.bfloat16):
            outputs = list(calls(input, weight, comm))
            for output, want in zip(outputs, plain, strict=True):
                assert output.dtype == torch.float32
                assert torch.equal(output, want)
        for output in outputs:
            output.sum().backward()
        half = [tensor.detach().half() for tensor in (input, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            assert fused_ops.gemm_all_reduce(*half, comm=comm).dtype == torch.float16


@pytest.mark.parametrize("rows", [6, 300])
def test_autocast_changes_nothing(rows):
    run_ranks(2, under_autocast, rows)


def changed_in_place():
    for comm in COMMS:
        input, weight = factors()
        for batched in (input, input.unsqueeze(0)):
            torch.nn.functional.relu(
                fused_ops.gemm_all_reduce(batched, weight, comm=comm), inplace=True
            ).sum().backward()
        for output in calls(input, weight, comm):
            output.add_(1).sum().backward()


def test_outputs_may_be_changed_in_place():
    run_ranks(2, changed_in_place)


def second_derivative():
    for comm in COMMS:
        input, weight = factors()
        output = fused_ops.gemm_all_reduce(input, weight, comm=comm)
        (gradient,) = torch.autograd.grad((output**3).sum(), input, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()


def test_a_second_derivative_is_refused():
    run_ranks(2, second_derivative)


def meta_weight():
    input, weight = factors()
    for operator in (fused_ops.gemm_all_reduce, fused_ops.gemm_reduce_scatter, fused_ops.all_gather_gemm):
        with pytest.raises(ValueError, match=f"{operator.__name__}: input is on cpu, but weight on meta"):
            operator(input, weight.to("meta"))


def test_a_weight_on_the_meta_device_is_an_error():
    run_ranks(2, meta_weight)
