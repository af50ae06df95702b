"""The CUDA embedding kernels on the CPU, under the address and undefined-behaviour sanitizers (tests/emulator)."""

import os
import platform
import subprocess
import sys

import pytest

from fused_ops.compiler import find_nvcc
from tests.emulator.build import build, sanitizers

pytestmark = [
    pytest.mark.skipif(find_nvcc() is None, reason="the headers of a CUDA toolkit are not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator switches fibers by x86-64 instructions"),
]


def emulate(*arguments):
    build()  # here, where no sanitizer slows the compilers down
    # PyTorch and Python are not instrumented, and leave memory behind.
    environment = {"LD_PRELOAD": sanitizers(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [sys.executable, "-m", "tests.emulator.run", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("link", "every", "schedule"), [("peer", "1", "0"), ("pinned", "5", "1")])
def test_every_kernel_equals_float64_and_stays_within_its_memory(link, every, schedule):
    done = emulate("problems", link, every, schedule)
    assert done.returncode == 0, done.stderr[-6000:]


def test_an_overrun_is_found():
    done = emulate("overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
    assert "rows_kernel" in done.stderr


def test_a_rank_that_makes_no_call_is_named():
    done = emulate("absent")
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("link", ["peer", "pinned"])
def test_a_rank_that_rejects_is_named(link):
    done = emulate("rejected", link)
    assert done.returncode == 0, done.stderr[-6000:]


def test_a_wrong_offset_is_named_wherever_it_is():
    done = emulate("bad_offsets")
    assert done.returncode == 0, done.stderr[-6000:]
