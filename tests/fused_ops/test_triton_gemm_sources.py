"""What can be said of the GEMM kernels without a GPU: they compile for sm_90 to instructions for tensor cores and TMA, fit an SM
and its registers, and order their flags behind the data.
"""

import re
import subprocess

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fused_ops.backends.triton import check  # noqa: E402
from fused_ops.backends.triton.gemm_gather import gather_gemm_kernel  # noqa: E402
from fused_ops.backends.triton.gemm_launch import poison_kernel  # noqa: E402
from fused_ops.backends.triton.gemm_one_phase import one_phase_kernel  # noqa: E402
from fused_ops.backends.triton.gemm_sums import partial_sums_kernel  # noqa: E402
from fused_ops.backends.triton.gemm_tiles import FLAT, H200_SHARED_BYTES, LARGE, MEDIUM, MEDIUM_FLOAT, SMALL  # noqa: E402
from tests.fused_ops.test_triton_sources import unordered_flags, wrong_flags  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(check.check_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set: nothing is compiled"
)

FEW_SPILLED_BYTES = 256  # a thread: what the epilogue needs again, not what the main loop works on
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
VARIANTS = [
    (partial_sums_kernel, LARGE, torch.bfloat16, {"EVERYWHERE": False, "A_TRANSPOSED": False, "B_TRANSPOSED": False}),
    (partial_sums_kernel, LARGE, torch.float16, {"EVERYWHERE": True, "A_TRANSPOSED": False, "B_TRANSPOSED": True}),
    (partial_sums_kernel, MEDIUM, torch.bfloat16, {"EVERYWHERE": False, "A_TRANSPOSED": True, "B_TRANSPOSED": True}),
    (
        partial_sums_kernel,
        MEDIUM_FLOAT,
        torch.float32,
        {"EVERYWHERE": True, "A_TRANSPOSED": False, "B_TRANSPOSED": True},
    ),
    (one_phase_kernel, SMALL, torch.bfloat16, {"A_TRANSPOSED": False, "B_TRANSPOSED": False}),
    (gather_gemm_kernel, LARGE, torch.bfloat16, {"B_TRANSPOSED": False, "INNER_ALIGN": 8, "HAS_TMA": True}),
    (gather_gemm_kernel, FLAT, torch.float32, {"B_TRANSPOSED": True, "INNER_ALIGN": 4, "HAS_TMA": True}),
]


def compiled(kernel, shape, dtype, constants):
    """The kernel for sm_90, its pointers aligned as torch aligns them."""
    constants = {
        **shape.constants(dtype, torch.device("cpu")),
        **constants,
        "DTYPE": DTYPES[dtype],
        "HAS_BIAS": True,
        "ALIGN": 16 // dtype.itemsize,
    }
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    inner = constants["BLOCK_K"]
    blocks = {
        "a": [inner, shape.rows] if constants.get("A_TRANSPOSED") else [shape.rows, inner],
        "gathered": [shape.rows, inner],
        "b": [inner, shape.columns] if constants["B_TRANSPOSED"] else [shape.columns, inner],
    }
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<{DTYPES[dtype].name}{blocks[name]}>"
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        else:
            signature[name] = f"*{DTYPES[dtype].name}" if name in ("bias", "source") else "*i64"
            attributes[(number,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(ptx, folder):
    """What ptxas stores in local memory for want of registers."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", path, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said).group(1))


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "constants"),
    VARIANTS,
    ids=[f"{v[0].__name__}-{v[1].rows}x{v[1].columns}" for v in VARIANTS],
)
def test_kernels_compile_as_meant(tmp_path, kernel, shape, dtype, constants):
    kernel_for_sm_90 = compiled(kernel, shape, dtype, constants)
    ptx = kernel_for_sm_90.asm["ptx"]
    assert wrong_flags(ptx) == []
    assert unordered_flags(ptx) == []
    assert not re.search(r"(atom|red)\.\S*\.sys", ptx), "no read-modify-write crosses the link"
    assert "ld.acquire.sys" in ptx
    assert "st.release.sys" in ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx, "operands come by TMA"
    assert spilled_bytes(ptx, tmp_path) <= FEW_SPILLED_BYTES
    assert re.search(r"st\.global\.v4\.b32", ptx), "narrow stores into the peer"
    assert re.search(r"ld\.global\.(cg\.)?v4\.b32", ptx), "narrow loads of what arrived"
    assert ("fence.proxy.async.global" in ptx) == (kernel is gather_gemm_kernel)
    assert kernel_for_sm_90.metadata.shared * shape.programs_an_sm <= H200_SHARED_BYTES


def test_the_poison_kernel_compiles():
    source = ASTSource(poison_kernel, signature={"state": "*i64", "output": "i64", "output_bytes": "i64"})
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
