"""`fused_ops.embedding_all_to_all` and the operators of its backward under torch.library's checks and torch.compile."""

import pytest
import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer
from tests.ranks import run_ranks


def library_checks():
    from fused_ops.embedding_all_to_all import _ANCHOR

    ops, group = torch.ops.fused_ops, dist.group.WORLD.group_name
    table, indices, offsets = torch.randn(9, 16), torch.randint(0, 9, (20,)), torch.arange(11) * 2
    layout = EmbeddingLayout.table_wise([[16, 16]], [5])
    weights, state, lr = torch.rand(20), torch.rand(9), torch.tensor([0.1])
    lookups = (indices, offsets, weights, [0, 0], layout.encoded, layout.dtype, "mean", "error")
    where = (group, 0, "host", False)
    for kind, leaf in (("none", table.clone().requires_grad_()), ("rowwise_adagrad", table)):
        states, rate = ([], None) if kind == "none" else ([state.clone()], lr)
        forward = (_ANCHOR, [leaf], *lookups, kind, states, rate, [1e-6], True, *where)
        torch.library.opcheck(ops.embedding_all_to_all.default, forward)
    exchange = (torch.randn(5, 32), [table], *lookups, True, *where)
    torch.library.opcheck(ops.embedding_all_to_all_gradient.default, exchange)
    grad, order = ops.embedding_all_to_all_gradient(*exchange)
    local = (*lookups, True, group, 0, "host", False)
    update = (grad, order, [table.clone()], [state], lr, [1e-6], "rowwise_adagrad", *local)
    torch.library.opcheck(ops.embedding_update.default, update)
    torch.library.opcheck(ops.embedding_gradients.default, (grad, order, [table], [0], *local))


def test_opcheck():
    run_ranks(1, library_checks)


def five_equal_calls(backend):
    """Equal calls may not be merged, unused ones not dropped; updates land once each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = EmbeddingLayout.table_wise([[8]] * world, [3] * world)
    indices, offsets = torch.arange(3 * world) % 4, torch.arange(3 * world + 1)

    def step(tables, optimizer, x):
        outputs = [
            fused_ops.embedding_all_to_all(tables, indices, offsets, layout, optimizer=optimizer, comm="host")
            for _ in range(5)
        ]
        fused_ops.all_to_all(x, comm="host")  # its result is not used
        return sum((output * x).sum() for output in outputs)

    results = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        for kind in ("none", "rowwise_adagrad"):
            table = torch.arange(32.0).view(4, 8) * 0.01 + rank
            table.requires_grad_(kind == "none")
            states = [] if kind == "none" else [torch.zeros(4)]
            optimizer = None if kind == "none" else FusedOptimizer(kind, 0.1, 1e-8, states)
            x = torch.linspace(0, 1, 3 * 8 * world).view(3, 8 * world).requires_grad_()
            fused_ops.reset_counters()
            loss = function([table], optimizer, x)
            loss.backward()
            calls = {key[0]: n for key, n in fused_ops.counters().items()}
            last = "gradients" if kind == "none" else "update"
            assert calls == {
                "embedding_all_to_all": 5,
                "all_to_all": 1,
                "embedding_all_to_all_gradient": 5,
                f"embedding_all_to_all_{last}": 5,
            }, (backend, kind, calls)
            results.append([loss.detach(), table.detach(), x.grad, *states, *([table.grad] if kind == "none" else [])])
    half = len(results) // 2
    for eager, compiled in zip(results[:half], results[half:], strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_keeps_every_call(backend):
    run_ranks(1, five_equal_calls, backend, timeout=240, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})
