"""A stand-in for a GPU, so that the CUDA session of launch.bench runs on a machine without one.

Streams run at once, graphs call again what was captured, events read the clock; cuda's operators are the host's. It shows
that the session's parts fit together and that every rank does the same; it says nothing about speed.
"""

import contextlib
import importlib
import time
import types

import torch
import torch.distributed as dist

import fused_ops
from launch.bench import cuda_rates, cuda_session, cuda_timing, gpu_links, nccl_groups, shapes
from launch.bench.settings import BenchSettings
from launch.lab import nccl

HOST_OF = {"cuda": "host", "triton": "host"}


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def capture(run, calls, stream, pool):
    """A graph in name: it calls again what was captured."""
    return types.SimpleNamespace(replay=lambda: [run(i) for i in range(calls)])


def install():
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.Event = Event
    torch.cuda._sleep = lambda cycles: None
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
    torch.cuda.graph_pool_handle = lambda: (0, 1)
    properties = types.SimpleNamespace(name="stand-in", multi_processor_count=132, L2_cache_size=1 << 16)
    torch.cuda.get_device_properties = lambda device: properties
    cuda_timing.capture = cuda_session.capture = capture
    cuda_session.take_card = lambda rank, ranks_per_gpu: torch.device("cpu")
    gpu_links.label = lambda group: gpu_links.SAME_GPU
    nccl.loaded_version = lambda: (2, 32, 3)
    nccl_groups.make = lambda ctas, timeout_s: dist.new_group(backend="gloo")
    cuda_rates.MIB, cuda_rates.PINNED_MIB, cuda_rates.SELECTED_ROWS, shapes.PROBE_BATCH = 1, 1, 64, 16
    for operator in ("all_to_all", "embedding_all_to_all"):
        _translate(operator)


def _translate(operator):
    original = getattr(fused_ops, operator)

    def translated(*args, comm, **options):
        return original(*args, comm=HOST_OF.get(comm, comm), **options)

    setattr(fused_ops, operator, translated)


def session_rows(words, spoil=None):
    """On one rank: every block of a run with these settings; `spoil` of this module is called first."""
    from launch.bench.ranks import _block, positions
    from launch.bench.settings import parse

    install()
    torch.cuda.device_count = lambda: 1
    if spoil:
        globals()[spoil]()
    settings: BenchSettings = parse(words)
    rank, notes = dist.get_rank(), []
    dist.init_process_group = lambda *_, **__: None  # the test has one already
    session = cuda_session.make(settings, rank, "", lambda message: notes.append(message[1]))
    build = importlib.import_module(f"launch.bench.{settings.op}").variants
    blocks = [
        (position, _block(session, settings, link, shape, build))
        for position, (link, shape) in session.in_order(positions(settings))
    ]
    session.close()
    return blocks, notes


def wrong_results():
    """Unfused gives something else than baseline, on rank 1 alone."""
    original = fused_ops.embedding_all_to_all

    def wrong(*args, comm, **options):
        output = original(*args, comm=comm, **options)
        return output + 1 if comm == "unfused" and dist.get_rank() == 1 else output

    fused_ops.embedding_all_to_all = wrong


def failing_backward():
    """No backward goes through."""

    def fail(*_):
        raise NotImplementedError("no backward here")

    torch.Tensor.backward = fail


def uncapturable_backward():
    """On rank 1 nothing that runs a backward can be captured."""

    def refuse(run, calls, stream, pool):
        if "backward" in run.__name__ and dist.get_rank() == 1:
            return "RuntimeError: it waits for the device"
        return capture(run, calls, stream, pool)

    cuda_timing.capture = refuse
