"""What can be said without a GPU of the C interface between the CUDA backend's two sides."""

import re

from fused_ops.backends.cuda.embedding_native import STRUCTS
from fused_ops.compiler import NATIVE, PACKAGE
from fused_ops.symmetric.cuda_memory import INT64_RESULTS

SOURCES = sorted(NATIVE.glob("*.cu")) + sorted((PACKAGE / "backends" / "cuda").glob("*.cu"))


def test_every_function_that_python_calls_is_there():
    defined = set(re.findall(r"^\S.*?\b(fo_cuda_\w+)\(", "\n".join(p.read_text() for p in SOURCES), re.MULTILINE))
    called = set()
    for path in PACKAGE.rglob("*.py"):
        called |= set(re.findall(r"\.(fo_cuda_\w+)", path.read_text()))
    called |= {f"fo_cuda_{name}" for name in INT64_RESULTS} | {f"fo_cuda_{name}_bytes" for name in STRUCTS}
    assert called
    assert called <= defined, called - defined
