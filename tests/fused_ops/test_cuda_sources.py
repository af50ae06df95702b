"""What can be said of the CUDA sources without a GPU: they compile, and every flag access has system scope.

Ranks that share one card, as tests on a single GPU do, also see flags of device scope, so only the PTX can tell.
"""

import re
import subprocess

import pytest

from fused_ops.compiler import NATIVE, PACKAGE, build_cuda_library, find_nvcc

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")

ORDERED_ACCESS = re.compile(r"^\s*((?:ld|st|atom|red|fence)\.(?:acquire|release|acq_rel)\S*)", re.MULTILINE)
RELAXED_ACCESS = re.compile(r"\b((?:ld|st)\.relaxed\S*)")


def _ptx(source, tmp_path):
    out = tmp_path / "kernel.ptx"
    command = [find_nvcc(), "-std=c++20", "-O3", "-ptx", "-arch=compute_80", f"-I{NATIVE}", "-o", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out.read_text()


def test_every_flag_access_is_system_scope(tmp_path):
    kernels = sorted((PACKAGE / "backends" / "cuda").glob("*.cu"))
    with_peers = [k for k in kernels if "CallParams" in k.read_text()]
    assert [k.stem for k in with_peers] == ["all_to_all", "embedding_all_to_all", "embedding_rows", "gemm_all_reduce"]
    for kernel in with_peers:
        ptx = _ptx(kernel, tmp_path)
        accesses, relaxed = ORDERED_ACCESS.findall(ptx), RELAXED_ACCESS.findall(ptx)
        assert relaxed, kernel
        assert all(".sys" in a for a in relaxed), (kernel, sorted(set(relaxed)))
        if kernel.stem == "gemm_all_reduce":  # a packet is one access, data and epoch together
            assert {"ld.relaxed.sys.global.b128", "st.relaxed.sys.global.b128"} <= set(relaxed)
        flags = [a for a in accesses if a.startswith(("ld.", "st."))]
        assert any(a.startswith("ld.acquire") for a in flags), kernel
        assert any(a.startswith("st.release") for a in flags), kernel
        assert all(".sys" in a for a in flags), (kernel, sorted(set(flags)))


def test_the_search_finds_a_device_scope_flag():
    assert ORDERED_ACCESS.findall("  ld.acquire.gpu.global.u64 %rd1, [%rd2];") == ["ld.acquire.gpu.global.u64"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_ahead_of_time(arch):
    assert build_cuda_library(arch).exists()
