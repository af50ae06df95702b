"""The CUDA kernels of GEMM + AllReduce on the CPU, under the address and undefined-behaviour sanitizers (tests/emulator)."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from fused_ops.backends.cuda import gemm_all_reduce as backend
from fused_ops.backends.cuda.gemv_shape import ANY_STRIDES, BY_COLUMNS, BY_ROWS, shape_of
from fused_ops.compiler import find_nvcc
from tests.emulator.build import build, sanitizers

pytestmark = [
    pytest.mark.skipif(find_nvcc() is None, reason="the headers of a CUDA toolkit are not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator switches fibers by x86-64 instructions"),
]


def emulate(*scenarios):
    build()  # here, where no sanitizer slows the compilers down
    # PyTorch and Python are not instrumented, and leave memory behind.
    environment = {"LD_PRELOAD": sanitizers(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [sys.executable, "-m", "tests.emulator.run_gemm", *scenarios]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)


def test_equals_float64_for_every_dtype_and_layout():
    done = emulate("problems:2:peer:one_phase:13:1", "problems:4:pinned:two_phases:13:2")
    assert done.returncode == 0, done.stderr[-6000:]


def test_long_tall_and_empty_weights():
    done = emulate("large:one_phase", "large:two_phases")
    assert done.returncode == 0, done.stderr[-6000:]


def test_bits_repeat_and_calls_follow_and_overlap_one_another():
    done = emulate("repeatable", "mixed", "two_in_flight", "one_after_another", "alone")
    assert done.returncode == 0, done.stderr[-6000:]


def test_failures_are_named_and_poison_the_output():
    done = emulate("absent:one_phase", "absent:two_phases", "rejected:one_phase", "rejected:two_phases", "disagree")
    assert done.returncode == 0, done.stderr[-6000:]


def test_an_overrun_is_found():
    done = emulate("overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
    assert "gemm_all_reduce_kernel" in done.stderr


def test_a_weight_is_read_as_its_memory_allows():
    whole = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert backend.layout_of(whole) == BY_ROWS
    assert backend.layout_of(whole[:, :64]) == BY_ROWS  # a slice of the inner dimension
    assert backend.layout_of(whole.t()) == BY_COLUMNS
    assert backend.layout_of(whole[:, 1:]) == ANY_STRIDES
    assert backend.layout_of(torch.zeros(64, 7, dtype=torch.bfloat16)) == ANY_STRIDES
    assert backend.layout_of(torch.zeros(7, 64, dtype=torch.bfloat16).t().contiguous().t()) == ANY_STRIDES


class Kernels:
    """The limits of a kernel, as the library tells them."""

    def __init__(self, *limits):
        self.limits = limits

    def fo_cuda_gemm_limits(self, dtype, layout, inputs, found):
        found[:] = self.limits


@pytest.mark.parametrize("limits", [(64, 8, 2, 512, 90112), (32, 64, 4, 384, 90112), (32, 16, 2, 512, 90112)])
@pytest.mark.parametrize("columns", [1, 8, 1000, 4096, 8192, 100_000])
@pytest.mark.parametrize("inner", [0, 8, 1024, 14336])
def test_a_shape_covers_the_product_within_the_kernels_limits(limits, columns, inner):
    warp_rows, warp_inputs, depth, threads, shared_bytes = limits
    for inputs, layout, blocks in ((1, BY_ROWS, 62), (min(64, 4 * warp_inputs), BY_COLUMNS, 31)):
        found = shape_of(Kernels(*limits), 2, layout, inputs, columns, inner, blocks)
        tile = found.tile
        assert (found.tiles - 1) * tile.rows < columns <= found.tiles * tile.rows
        assert found.blocks <= min(blocks, found.tiles)
        assert tile.rows <= tile.group_rows * tile.row_groups
        assert tile.group_rows <= warp_rows
        assert inputs <= tile.input_groups * warp_inputs
        assert found.threads <= threads
        assert found.shared_bytes <= shared_bytes
        assert tile.rounds * tile.k_groups * depth * 32 >= inner
        assert tile.slabs * tile.rounds_a_slab >= tile.rounds
        if layout == BY_COLUMNS:
            assert tile.rows % 8 == tile.group_rows % 8 == 0


def test_the_interface_has_no_gaps():
    assert ctypes.sizeof(backend.GemmParams) % 8 == 0
    assert backend.takes(64)
    assert not backend.takes(65)
