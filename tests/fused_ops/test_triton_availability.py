"""Where the Triton backend cannot run, every rank says why, in the same words."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import BackendUnavailableError, EmbeddingLayout
from tests.ranks import run_ranks


def call():
    world = dist.get_world_size()
    lookups = torch.arange(world + 1)
    layout = EmbeddingLayout.table_wise([[4]] * world, [1] * world)
    return fused_ops.embedding_all_to_all([torch.zeros(9, 4)], lookups[:-1], lookups, layout, comm="triton")


def cpu_tensors():
    with pytest.raises(ValueError, match="backend 'triton' takes cuda tensors, got one on cpu"):
        call()


def interpreter_too_late():
    import torch._dynamo  # noqa: F401  (which imports Triton: as a rule the fork server has, before the variable was set)

    with pytest.raises(
        BackendUnavailableError, match="TRITON_INTERPRET changed after Triton had been imported"
    ) as error:
        call()
    return str(error.value)


def test_cpu_tensors_need_the_interpreter():
    run_ranks(2, cpu_tensors)


def test_an_interpreter_asked_for_too_late():
    first, second = run_ranks(2, interpreter_too_late, env={"TRITON_INTERPRET": "1"})
    assert first == second
