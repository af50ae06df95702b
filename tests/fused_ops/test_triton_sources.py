"""What can be said of the Triton kernels without a GPU: they compile for sm_90, and every flag access has system scope.

Ranks that share one card, as tests on a single GPU do, also see flags of device scope, so only the PTX can tell.
"""

import re

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fused_ops.backends.triton import check, exchange_gradient, finish, lookup, update, weight_gradient  # noqa: E402
from fused_ops.backends.triton.launch import LANES, MOST_REGISTERS, NUM_WARPS  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(check.check_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set: nothing is compiled"
)

FLOATS = {"learning_rate", "corrections", "scratch", "out", "weights"}
FLAG = re.compile(r"^.*?((?:ld|st|atom|red)\.(?:\w+\.)*(?:acquire|release|acq_rel)\.\S*)", re.MULTILINE)

ROWS = {"ALIGN": 4, "BLOCK_D": 128}
LOOKUP = {"POLICY": 0, "TABLE_BYTES": 16, "BAGS": 16, "LANES": LANES, **ROWS}
UPDATE = {"BITS": 20, "TARGET_BYTES": 16, "STATE_BYTES": 16, "PIECE": 64, **ROWS}
PLAIN = {"WEIGHTED": False, "MEAN": False}
VARIANTS = [
    (check.check_kernel, {"ANY_INDEX": False, "BLOCK": 1024}),
    (check.check_kernel, {"ANY_INDEX": True, "BLOCK": 1024}),
    (finish.finish_kernel, {"REJECTED_HERE": False, "LANES": LANES}),
    (finish.finish_kernel, {"REJECTED_HERE": True, "LANES": LANES}),
    (lookup.lookup_kernel, {**LOOKUP, **PLAIN, "DTYPE": tl.float32}),
    (lookup.lookup_kernel, {**LOOKUP, "DTYPE": tl.bfloat16, "WEIGHTED": True, "MEAN": True, "POLICY": 1}),
    (lookup.lookup_kernel, {**LOOKUP, **PLAIN, "DTYPE": tl.float16, "POLICY": 2, "ALIGN": 1, "TABLE_BYTES": 2}),
    *(
        (
            exchange_gradient.exchange_gradient_kernel,
            {**ROWS, "DTYPE": dtype, "DIVIDE": divide, "ROWS": 16, "LANES": LANES},
        )
        for dtype, divide in ((tl.float32, True), (tl.bfloat16, False))
    ),
    *((update.update_kernel, {**UPDATE, **PLAIN, "DTYPE": tl.float32, "OPTIMIZER": o, "ROWS": 16}) for o in range(5)),
    (
        update.update_kernel,
        {**UPDATE, "WEIGHTED": True, "MEAN": True, "DTYPE": tl.bfloat16, "OPTIMIZER": 3, "ROWS": 16},
    ),
    (update.update_long_rows_kernel, {**UPDATE, "WEIGHTED": True, "DTYPE": tl.float32, "OPTIMIZER": 4}),
    (
        weight_gradient.weight_gradient_kernel,
        {**ROWS, "BITS": 20, "MEAN": True, "DTYPE": tl.float16, "TABLE_BYTES": 16, "ROWS": 16},
    ),
]
SENDERS = ("lookup_kernel", "exchange_gradient_kernel")


def compiled(kernel, constants):
    """The kernel for sm_90, its pointers aligned as torch aligns them."""
    of_dtype = f"*{constants['DTYPE'].name}" if "DTYPE" in constants else "*i64"
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        else:
            signature[name] = of_dtype if name == "grad" else "*fp32" if name in FLOATS else "*i64"
            attributes[(number,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places, attrs=attributes)
    options = {"num_warps": NUM_WARPS, **({"maxnreg": MOST_REGISTERS} if kernel.__name__ in SENDERS else {})}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def wrong_flags(ptx):
    """Ordered accesses that are neither of system scope nor the device's own counters of tiles."""
    counters = re.compile(r"atom\.global\.gpu\.acq_rel\.add")
    return [
        a for a in FLAG.findall(ptx) if not counters.match(a) and not re.match(r"(ld\.acquire|st\.release)\.sys\.", a)
    ]


def unordered_flags(ptx):
    """Flags, and counts of tiles, before which a thread may still have to store its part of the data: no barrier stands
    between them and the start of their basic block, or the last store in it."""
    found, is_behind_barrier = [], False
    for line in ptx.splitlines():
        if "bar.sync" in line:
            is_behind_barrier = True
        elif "st.release" in line or "acq_rel" in line:
            found += [] if is_behind_barrier else [line.strip()]
        elif "st.global" in line or line.startswith(("$L__BB", "// %bb")):
            is_behind_barrier = False
    return found


@pytest.mark.parametrize(
    ("kernel", "constants"), VARIANTS, ids=lambda value: value.__name__ if hasattr(value, "__name__") else ""
)
def test_kernels_compile_with_flags_of_system_scope_behind_a_barrier(kernel, constants):
    ptx = compiled(kernel, constants).asm["ptx"]
    assert wrong_flags(ptx) == []
    assert unordered_flags(ptx) == []
    assert not re.search(r"(atom|red)\.\S*\.sys", ptx), "no read-modify-write crosses the link"
    has_flags = bool(re.search("ld.acquire.sys", ptx)) and bool(re.search("st.release.sys", ptx))
    assert has_flags == (kernel.__name__ in (*SENDERS, "finish_kernel"))
    if kernel.__name__ in SENDERS and constants["ALIGN"] == 4:
        assert re.search(r"ld\.global\.v[24]\.b32", ptx), "narrow loads"
        assert re.search(r"st\.global\.v[24]\.b32", ptx), "narrow stores into the peer"


def test_the_search_finds_a_device_scope_flag_and_a_missing_barrier():
    assert wrong_flags("@%p ld.acquire.gpu.global.b64 %rd1, [%rd2];") == ["ld.acquire.gpu.global.b64"]
    assert wrong_flags("@%p1 atom.global.acquire.gpu.cas.b64 %rd1, [%rd2], 0, 1;") != []
    assert wrong_flags("st.release.sys.global.b64 [%rd1], %rd2;") == []
    store, flag = "st.global.v4.b32 [%rd1], {%r1};", "@%p st.release.sys.global.b64 [%rd1], %rd2;"
    assert unordered_flags(f"{store}\n{flag}") == [flag]
    assert unordered_flags(f"{store}\nbar.sync 0;\n{flag}") == []
    assert unordered_flags(f"bar.sync 0;\n$L__BB0_7:\n{flag}") == [flag]
