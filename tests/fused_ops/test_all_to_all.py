"""`fused_ops.all_to_all` on the host backend: what it delivers, forward and backward, and what it refuses."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import fused_ops
from tests.ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def splits_of(world: int, seed: int, largest: int) -> list[list[int]]:
    """splits[source][target], the same on every rank, about a third of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-largest // 2, largest + 1, (world, world), generator=generator).clamp(min=0)
    return values.tolist()


def content(source: int, target: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `source` sends to `target` in `call`: small integers, so that every dtype holds them exactly."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 31 + source * 7 + target * 13 + call * 29) % 113
    return values.reshape(shape).to(dtype)


def exchange(call: int, splits: list[list[int]], trailing: tuple[int, ...], dtype: torch.dtype, **options) -> None:
    """One uneven exchange, checked against what the rule says, not against another collective."""
    group = options.get("group")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    group = options.get("group")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sent = [content(rank, t, call, (splits[rank][t], *trailing), dtype) for t in range(world)]
    want = [content(s, rank, call, (splits[s][rank], *trailing), dtype) for s in range(world)]
    input = torch.cat([piece.view(torch.uint8) if dtype.itemsize == 1 else piece for piece in sent])
    input = input.view(dtype) if dtype.itemsize == 1 else input
    before = input.clone()
    output = fused_ops.all_to_all(
        input,
        output_splits=[splits[s][rank] for s in range(world)],
        input_splits=splits[rank],
        **{"comm": "host", **options},
    )
    assert output.dtype == dtype
    expected = torch.cat([piece.view(torch.uint8) if dtype.itemsize == 1 else piece for piece in want])
    as_bytes = (lambda t: t.view(torch.uint8)) if dtype.itemsize == 1 else (lambda t: t)
    assert torch.equal(as_bytes(output), expected), f"call {call}, splits {splits}"
    assert torch.equal(as_bytes(input), as_bytes(before))


def every_shape_and_dtype():
    world = dist.get_world_size()
    call = 0
    for dtype in DTYPES:
        for trailing in [(), (3,), (2, 5), (0,), (1, 1, 1, 7)]:
            for largest in (1, 9):
                call += 1
                exchange(call, splits_of(world, call, largest), trailing, dtype)
    exchange(1000, [[0] * world for _ in range(world)], (4,), torch.float32)
    one_sender = [[5] * world if s == world - 1 else [0] * world for s in range(world)]
    exchange(1001, one_sender, (4,), torch.float32)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_exchanges_deliver_what_was_sent(world):
    run_ranks(world, every_shape_and_dtype)


def same_as_baseline():
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for rows in (0, 1, 6):
        base = torch.randn(rows * world, 8, generator=generator)
        inputs = {
            "contiguous": base,
            "transposed": base.T.contiguous().T,
            "strided": torch.randn(rows * world, 16, generator=generator)[:, ::2],
            "expanded": torch.randn(rows * world, 1, generator=generator).expand(-1, 8),
        }
        for name, input in inputs.items():
            results = {}
            for comm in ("host", "baseline"):
                leaf = input.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                output = fused_ops.all_to_all(leaf, comm=comm)
                weight = torch.arange(output.numel(), dtype=torch.float32).view_as(output) + rank
                (output * weight).sum().backward()
                results[comm] = (output.detach(), leaf.grad)
            assert torch.equal(results["host"][0], results["baseline"][0]), name
            assert torch.equal(results["host"][1], results["baseline"][1]), name


def test_even_exchange_and_gradient_equal_baseline():
    run_ranks(2, same_as_baseline)


def uneven_gradient():
    rank, world = dist.get_rank(), dist.get_world_size()
    splits = splits_of(world, 5, 6)
    send, receive = splits[rank], [splits[s][rank] for s in range(world)]
    grads = {}
    for comm in ("host", "baseline"):
        leaf = torch.randn(sum(send), 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        output = fused_ops.all_to_all(leaf, output_splits=receive, input_splits=send, comm=comm)
        again = fused_ops.all_to_all(output.sin(), output_splits=send, input_splits=receive, comm=comm)
        again.mul_(2)  # in place on what was returned: it is the caller's
        (again * leaf).sum().backward()
        grads[comm] = leaf.grad
    assert torch.equal(grads["host"], grads["baseline"])
    # A rank that sends and receives nothing still has a connected graph and takes part in backward.
    empty = torch.zeros(0, 3, requires_grad=True)
    output = fused_ops.all_to_all(empty, output_splits=[0] * world, input_splits=[0] * world, comm="host")
    output.sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 3)


def test_gradient_of_uneven_exchanges():
    run_ranks(3, uneven_gradient)


def conjugates():
    rank = dist.get_rank()
    values = torch.tensor([1 + 2j, 3 - 4j]) + rank
    output = fused_ops.all_to_all(values.conj(), comm="host")
    expected = torch.stack([torch.tensor([1 + 2j, 3 - 4j])[rank] + s for s in range(2)]).conj().resolve_conj()
    assert torch.equal(output, expected)
    negative = fused_ops.all_to_all(values.conj().imag, comm="host")
    assert torch.equal(negative, expected.imag)


def test_lazily_conjugated_and_negated_inputs():
    run_ranks(2, conjugates)


def bad_inputs():
    x = torch.zeros(4, 2)
    cases = {
        "scalar": {"input": torch.tensor(1.0)},
        "divide evenly": {"input": torch.zeros(3, 2)},
        "one entry a rank": {"input": x, "input_splits": [4], "output_splits": [2, 2]},
        "not be negative": {"input": x, "input_splits": [5, -1], "output_splits": [2, 2]},
        "sum to": {"input": x, "input_splits": [1, 2], "output_splits": [2, 2]},
        "output_splits is needed": {"input": torch.zeros(3, 2), "input_splits": [1, 2]},
        "strided": {"input": torch.eye(4).to_sparse()},
    }
    for words, arguments in cases.items():
        with pytest.raises(ValueError, match=words):
            fused_ops.all_to_all(**arguments, comm="host")
    with pytest.raises(ValueError, match="channel must lie in"):
        fused_ops.all_to_all(x, channel=-1, comm="host")
    with pytest.raises(ValueError, match="no process group named"):
        fused_ops.all_to_all(x, group="nobody", comm="host")
    exchange(7, [[1, 2], [3, 0]], (2,), torch.float32)  # all that left the channel in working order


def test_bad_input_is_one_clear_error():
    run_ranks(2, bad_inputs)


def test_no_process_group_is_a_clear_error():
    with pytest.raises(ValueError, match="init_process_group"):
        fused_ops.all_to_all(torch.zeros(2))


def rejection_and_disagreement():
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange(0, splits_of(world, 0, 4), (2,), torch.float32)
    for _ in range(79):  # more rejections in a row than the descriptor ring is long
        with pytest.raises(ValueError if rank == 0 else fused_ops.PeerAbortedError):
            fused_ops.all_to_all(torch.zeros(world * 4 + (rank == 0), 2), comm="host")
    exchange(100, splits_of(world, 1, 4), (2,), torch.float32)
    disagreements = [
        {"input": torch.zeros(world * (1 + rank))},
        {"input": torch.zeros(world, dtype=torch.float32 if rank else torch.float64)},
        {"input": torch.zeros(world, 2 + rank)},
        {"input": torch.zeros(world), "input_splits": [1] * world, "output_splits": [1 + (rank == 0)] * world},
    ]
    fused_ops.all_to_all(torch.zeros(world, 2), comm="host")  # known to all, so rank 0 will not look before it sends
    for number, arguments in enumerate(disagreements):
        with pytest.raises(ValueError, match=r"ranks disagree|which expects"):
            fused_ops.all_to_all(**arguments, comm="host")
        exchange(200 + number, splits_of(world, number, 4), (2,), torch.float32)


@pytest.mark.parametrize("world", [2, 3])
def test_rejections_and_disagreements_leave_the_channel_working(world):
    run_ranks(world, rejection_and_disagreement)


def groups_and_channels():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for call in range(20):
        exchange(call, splits_of(3, call, 5), (2,), torch.float32)
        for members, group in zip([(0, 1), (1, 2), (0, 2)], pairs, strict=True):
            if rank in members:
                exchange(call, splits_of(2, call, 5), (2,), torch.float32, group=group)
                exchange(call + 1, splits_of(2, call + 1, 5), (2,), torch.float32, group=group, channel=3)
            elif call == 0:
                with pytest.raises(ValueError, match="not a member"):
                    fused_ops.all_to_all(torch.zeros(2), group=group)
    rows = {(row["group"], row["channel"]) for row in fused_ops.memory_report()}
    assert len(rows) == 5


def test_overlapping_groups_and_channels():
    run_ranks(3, groups_and_channels)


def large_message():
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = 150 << 20
    input = torch.full((rows * world,), rank + 1, dtype=torch.uint8)
    input[-1] = 77 + rank
    output = fused_ops.all_to_all(input, comm="host")
    for source in range(world):
        piece = output[source * rows : (source + 1) * rows]
        assert int(piece[0]) == source + 1
        assert int(piece[-1]) == (77 + source if rank == world - 1 else source + 1)
        assert int(piece[:-1].min()) == int(piece[:-1].max()) == source + 1


def test_300_megabytes():
    run_ranks(2, large_message)


def varied_in_threads():
    """Two threads with a channel each, which set up and call in different orders on different ranks."""
    import threading

    rank, errors = dist.get_rank(), []

    def work(channel: int) -> None:
        try:
            for call in range(100):
                exchange(call, splits_of(2, call * 2 + channel, 6), (2,), torch.float32, channel=channel)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in ((0, 1) if rank else (1, 0))]
    for thread in threads:
        thread.start()
        if thread is threads[0]:
            thread.join(timeout=0.5)  # its peer starts with the other channel: both must be able to set up at once
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_two_threads_on_two_channels():
    run_ranks(2, varied_in_threads)


def same_channel_twice():
    import threading

    rank = dist.get_rank()
    fused_ops.all_to_all(torch.zeros(2), comm="host")
    dist.barrier()
    if rank == 1:
        dist.barrier()
        fused_ops.all_to_all(torch.zeros(2), comm="host")
        return
    waiting = threading.Thread(target=lambda: fused_ops.all_to_all(torch.zeros(2), comm="host"))
    waiting.start()
    with contextlib.suppress(TimeoutError):
        waiting.join(timeout=0.3)
    with pytest.raises(RuntimeError, match="two threads"):
        fused_ops.all_to_all(torch.zeros(2), comm="host")
    dist.barrier()
    waiting.join()


def test_two_threads_on_one_channel_is_an_error():
    run_ranks(2, same_channel_twice)
