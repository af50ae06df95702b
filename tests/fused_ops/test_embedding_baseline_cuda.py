"""FBGEMM's CUDA kernels as the baseline calls them.

Without a GPU: every call against the schemas of FBGEMM 1.6.0 (fbgemm_1_6_0_schemas.txt) and of the version installed, and
the calls themselves through the CPU kernels of the same operators.
"""

import functools
import random
from pathlib import Path

import pytest
import torch

import fused_ops
from fused_ops import host_values
from fused_ops.backends.baseline import embedding_fbgemm_cuda, embedding_torch
from fused_ops.backends.baseline.embedding_pack import gathered_by_owner
from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.backends.baseline.index_checks import IndexChecks
from fused_ops.embedding_columns import pack
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from fused_ops.embedding_layout import EmbeddingLayout
from tests.fused_ops.embedding_reference import Case
from tests.ranks import run_ranks, take_card

pytest.importorskip("fbgemm_gpu")

SCHEMAS = Path(__file__).with_name("fbgemm_1_6_0_schemas.txt")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
DIMS, ROWS, BATCH = [4, 8, 8, 16], [5, 3, 7], 6
FEATURE_TABLES = [0, 1, 1, 2]


def together(tensors):
    """Copies in one storage, each as far from its start as in a list of the same shapes."""
    storage = torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)
    parts = storage.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def make_call(seed=0, weighted=False, pooling="sum", dtype=torch.float32, out_of_range="error", index_type=torch.int64):
    """One rank's inputs with a shared table, empty bags and distinct widths."""
    generator = torch.Generator().manual_seed(seed)
    dims = [DIMS[0], DIMS[1], DIMS[3]]
    tables = together([torch.randn(r, d, generator=generator).to(dtype) for r, d in zip(ROWS, dims, strict=True)])
    feature_dims = [dims[t] for t in FEATURE_TABLES]
    lengths = torch.randint(0, 4, (len(FEATURE_TABLES), BATCH), generator=generator)
    indices = [torch.randint(0, ROWS[t], (int(n.sum()),), generator=generator) for t, n in zip(FEATURE_TABLES, lengths)]  # noqa: B905
    indices = torch.cat(indices).to(index_type)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    weights = torch.rand(len(indices), generator=generator) if weighted else None
    layout = EmbeddingLayout.table_wise([feature_dims], [BATCH], dtype)
    return EmbeddingInputs(
        tables, indices, offsets, weights, FEATURE_TABLES, layout.encoded, dtype, pooling, out_of_range, 0, 1
    )


def make_optimizer(kind, tables):
    states = fused_ops.FusedOptimizer.make_states(kind, tables)
    moving = together(states[: len(states) - (kind == "adam")])
    constants = [1e-6, 0.8, 0.95] if kind == "adam" else [1e-6]
    return OptimizerInputs(kind, [*moving, *states[len(moving) :]], torch.tensor([0.1]), constants)


def calls_made(monkeypatch):
    """(operator, arguments) of every FBGEMM call that the baseline can make."""
    made = []

    def record(name):
        return lambda **arguments: made.append((name, arguments)) or torch.empty(0)

    monkeypatch.setattr(embedding_fbgemm_cuda, "_operator", record)
    for weighted in (False, True):
        inputs = make_call(weighted=weighted)
        grad = torch.randn(BATCH, inputs.local_dim)
        embedding_fbgemm_cuda.pool(inputs)
        embedding_fbgemm_cuda.weights_gradient(inputs, grad)
        embedding_fbgemm_cuda.dense_gradients(inputs, grad, [0])
        for kind in OPTIMIZERS:
            embedding_fbgemm_cuda.update(inputs, grad, make_optimizer(kind, inputs.tables))
    return made


ACCEPTS = {
    "Tensor": lambda value: value is None or isinstance(value, torch.Tensor),
    "int": lambda value: type(value) is int,
    "SymInt": lambda value: type(value) is int,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float),
}


def check_call(schema, arguments):
    given = dict(arguments)
    for argument in schema.arguments:
        if argument.name in given:
            kind = str(argument.real_type)
            assert ACCEPTS[kind](given.pop(argument.name)), f"{schema.name}: {argument.name} is no {kind}"
        else:
            assert argument.has_default_value(), f"{schema.name} needs {argument.name}"
    assert not given, f"{schema.name} does not know {sorted(given)}"


def test_every_call_fits_the_schemas_of_both_versions(monkeypatch):
    old = {schema.name: schema for schema in map(torch._C.parse_schema, SCHEMAS.read_text().splitlines())}
    made = calls_made(monkeypatch)
    assert len({name for name, _ in made}) == 2 + 1 + 2 * len(OPTIMIZERS)
    for name, arguments in made:
        check_call(old[f"fbgemm::{name}"], arguments)
        installed = getattr(torch.ops.fbgemm, name, None)
        assert installed is not None or "_adam_" in name  # which has no CPU kernel
        if installed is not None:
            check_call(installed.default._schema, arguments)
    check = torch.ops.fbgemm.bounds_check_indices.default._schema
    assert [a.name for a in old[check.name].arguments] == [a.name for a in check.arguments]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_calls_compute_what_torchs_kernels_do(dtype):
    for seed in range(6):
        index_type = random.Random(seed).choice([torch.int32, torch.int64])
        # FBGEMM's CPU kernel (not the GPU's) pools a weighted mean wrongly.
        for weighted, pooling in ((False, "sum"), (False, "mean"), (True, "sum")):
            make = functools.partial(make_call, seed, weighted, pooling, dtype, index_type=index_type)
            inputs = make()
            lookups = Lookups(make())
            grad = torch.randn(BATCH, inputs.local_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
            close = functools.partial(torch.testing.assert_close, rtol=4e-3, atol=4e-3)
            close(embedding_fbgemm_cuda.pool(inputs), embedding_torch.pool(lookups))
            wanted = [2, 0]
            for got, want in zip(
                embedding_fbgemm_cuda.dense_gradients(inputs, grad, wanted),
                embedding_torch.dense_gradients(lookups, grad, wanted),
                strict=True,
            ):
                close(got, want)
            if weighted:
                close(
                    embedding_fbgemm_cuda.weights_gradient(inputs, grad),
                    embedding_torch.weights_gradient(lookups, grad),
                )
            for kind in ("sgd", "adagrad", "rowwise_adagrad"):
                inputs, lookups = make(), Lookups(make())
                got, want = make_optimizer(kind, inputs.tables), make_optimizer(kind, inputs.tables)
                embedding_fbgemm_cuda.update(inputs, grad, got)
                embedding_torch.update(lookups, grad, want)
                for a, b in zip([*inputs.tables, *got.states], [*lookups.tables, *want.states], strict=True):
                    close(a, b)


def test_gradient_of_weights_of_a_mean():
    inputs, lookups = make_call(1, True, "mean"), Lookups(make_call(1, True, "mean"))
    grad = torch.randn(BATCH, inputs.local_dim)
    got, want = embedding_fbgemm_cuda.weights_gradient(inputs, grad), embedding_torch.weights_gradient(lookups, grad)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [-1, -7, 5])
def test_a_bad_index_is_raised_by_the_next_call_and_changes_no_input(value):
    checks = IndexChecks(torch.device("cpu"))
    inputs = make_call()
    at = int(inputs.offsets[BATCH]) - 1
    inputs.indices[at] = value
    kept = inputs.indices.clone(), inputs.offsets.clone()
    embedding_fbgemm_cuda.pool(inputs, checks)
    assert torch.equal(inputs.indices, kept[0])
    assert torch.equal(inputs.offsets, kept[1])
    with pytest.raises(ValueError, match=rf"index {value} \(position {at}, feature 0\) is out of range for table 0"):
        embedding_fbgemm_cuda.pool(make_call(), checks)
    embedding_fbgemm_cuda.pool(make_call(), checks)  # raised once
    checks.check_errors()


def test_bad_offsets_are_raised_too():
    checks = IndexChecks(torch.device("cpu"))
    inputs = make_call()
    inputs.offsets[3] = len(inputs.indices) + 9
    embedding_fbgemm_cuda.pool(inputs, checks)
    with pytest.raises(ValueError, match="offsets must not decrease"):
        checks.check_errors()


def test_what_was_bad_may_be_gone_when_it_is_raised():
    checks = IndexChecks(torch.device("cpu"))
    inputs = make_call()
    inputs.indices[0] = 99
    embedding_fbgemm_cuda.pool(inputs, checks)
    inputs.indices[0] = 0
    with pytest.raises(ValueError, match="1 indices or offsets were out of range on cpu"):
        checks.check_errors()


@pytest.mark.parametrize("policy", ["clamp", "hash"])
def test_indices_are_brought_into_range(policy):
    checks = IndexChecks(torch.device("cpu"))
    made = []
    for kernels in (embedding_fbgemm_cuda, embedding_torch):
        inputs = make_call(out_of_range=policy)
        inputs.indices[::3] += 1000
        inputs.indices[1::3] -= 2000
        if kernels is embedding_torch:
            made.append(kernels.pool(Lookups(inputs)))
        else:
            made.append(kernels.pool(inputs, checks))
    torch.testing.assert_close(made[0], made[1])
    checks.check_errors()


def test_gathering_packs_what_copying_runs_does():
    for seed in range(20):
        layout = Case.random(seed, 3, dtype=torch.float32).layout
        grad = torch.randn(layout.batch_sizes[1], layout.total_dim)
        assert torch.equal(gathered_by_owner(grad, layout), pack(grad, layout, 1))


def test_refuses_what_the_kernels_cannot():
    assert embedding_fbgemm_cuda.why_not(make_call()) is None
    assert "do not take torch.bfloat16" in embedding_fbgemm_cuda.why_not(make_call(dtype=torch.bfloat16))
    odd = make_call()
    odd.tables[1] = torch.zeros(3, 6)
    assert "multiples of 4 up to 2048, got 6" in embedding_fbgemm_cuda.why_not(odd)
    askew = make_call()
    askew.tables[1] = torch.zeros(100)[1:25].view(3, 8)
    assert "aligned to 16 bytes" in embedding_fbgemm_cuda.why_not(askew)
    empty = make_call()
    empty.tables[1] = torch.zeros(0, 8)
    assert "at least one row" in embedding_fbgemm_cuda.why_not(empty)


def test_host_values_are_read_again_only_after_a_write():
    tensor = torch.tensor([0.5])
    host_values.remember(tensor, 0.25)  # a wrong one, to tell it from a read
    assert host_values.host_value(tensor, "it") == 0.25
    assert host_values.host_value(host_values.clone(tensor), "it") == 0.25
    tensor.fill_(0.75)
    assert host_values.host_value(tensor, "it") == 0.75


def adam_steps():
    """The numbers that FBGEMM's Adam gets in four backwards, the step set to 10 after two, and how often one was read."""
    steps, reads = [], []
    read = torch.Tensor.item

    def update(inputs, grad, optimizer):
        torch.Tensor.item = lambda tensor: reads.append(len(steps)) or read(tensor)
        steps.append(embedding_fbgemm_cuda._next_step(optimizer.step))
        torch.Tensor.item = read

    embedding_torch.update = update  # FBGEMM has no Adam on the CPU
    table = torch.zeros(4, 8)
    optimizer = fused_ops.FusedOptimizer("adam", states=fused_ops.FusedOptimizer.make_states("adam", [table]))
    layout = EmbeddingLayout.table_wise([[8]], [2])
    for backward in range(4):
        if backward == 2:
            optimizer.states[-1].fill_(10)
        pooled = fused_ops.embedding_all_to_all(
            [table], torch.tensor([0, 1]), torch.arange(3), layout, optimizer=optimizer, comm="baseline"
        )
        pooled.sum().backward()
    return steps, reads, int(optimizer.states[-1])


def test_adams_step_is_read_only_where_somebody_has_written_it():
    assert run_ranks(1, adam_steps) == [([1, 2, 11, 12], [0, 2], 12)]


def random_calls(world, seeds):
    import torch.distributed as dist

    rank, device = dist.get_rank(), take_card()
    fused_ops.reset_counters()
    for seed in seeds:
        case = Case.random(seed, world)
        case.check(rank, _to_cpu(case.run(rank, device=device, comm="baseline")))
    return fused_ops.counters()


def _to_cpu(result):
    move = lambda tensors: [t.cpu() for t in tensors]  # noqa: E731
    weights_grad = None if result.weights_grad is None else result.weights_grad.cpu()
    return type(result)(
        result.output.cpu(), move(result.tables), move(result.states), move(result.table_grads), weights_grad
    )


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_random_calls_match_float64(world):
    counters = run_ranks(world, random_calls, world, range(60), backend="nccl", timeout=300)
    assert any(name[:2] == ("embedding_all_to_all_kernels", "fbgemm") for name in counters[0])


def wide_case(seed, optimizer, dtype=torch.float32):
    """One rank's call with widths that FBGEMM takes, tables and states wherever the allocator puts them."""
    inputs = make_call(seed, dtype=dtype)
    device = torch.device("cuda")
    tables = [t.to(device) for t in inputs.tables]
    states = [s.to(device) for s in fused_ops.FusedOptimizer.make_states(optimizer, inputs.tables)]
    made = fused_ops.FusedOptimizer(optimizer, 0.1, 1e-6, states, device=device)
    return inputs, tables, made


def captured_steps(optimizer):
    """Forward and backward in one graph, replayed, against the same steps run eagerly."""
    torch.cuda.set_device(0)
    results = []
    for captured in (False, True):
        inputs, tables, made = wide_case(3, optimizer)
        indices, offsets = inputs.indices.cuda(), inputs.offsets.cuda()

        def step(tables=tables, made=made, indices=indices, offsets=offsets, layout=inputs.layout):
            pooled = fused_ops.embedding_all_to_all(
                tables, indices, offsets, layout, feature_tables=FEATURE_TABLES, optimizer=made, comm="baseline"
            )
            pooled.backward(torch.ones_like(pooled))
            return pooled.detach()

        if captured:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                pooled = step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(5):
                pooled = step()
        torch.cuda.synchronize()
        fused_ops.check_errors()
        results.append([pooled, *tables, *made.states])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_training_step_is_captured_in_a_cuda_graph(optimizer):
    run_ranks(1, captured_steps, optimizer, backend="nccl")


def bad_index_on_the_gpu():
    torch.cuda.set_device(0)
    inputs, tables, _ = wide_case(0, "sgd")
    indices, offsets = inputs.indices.cuda(), inputs.offsets.cuda()
    indices[0] = -1
    call = functools.partial(
        fused_ops.embedding_all_to_all, tables, indices, offsets, inputs.layout, feature_tables=FEATURE_TABLES
    )
    call(comm="baseline")
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"index -1 \(position 0"):
        fused_ops.check_errors()
    indices[0] = 0
    fused_ops.exposed_wait_ms()
    call(comm="baseline")
    torch.cuda.synchronize()
    fused_ops.check_errors()
    return fused_ops.exposed_wait_ms()


@pytest.mark.gpu
def test_a_bad_index_on_the_gpu_is_raised_without_harm_to_the_context():
    assert run_ranks(1, bad_index_on_the_gpu, backend="nccl")[0] > 0  # ms of the exchange
