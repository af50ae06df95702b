"""Imports run one way: launch -> trainers -> models -> fused_ops -> torch."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["fused_ops", "models", "trainers", "launch"]  # each may import those before it
OPERATORS_MAY_IMPORT = {"torch", "fused_ops", *sys.stdlib_module_names}
# The baseline's strongest compute kernel, imported only where it runs.
LAZY = {("fused_ops/backends/baseline", "fbgemm_gpu")}
# The language of a backend's kernels, which exist once their file is imported: that is, once the backend was chosen.
DEFINE_KERNELS = {("fused_ops/backends/triton", "triton")}


def imports(source: str) -> list[tuple[str, int, bool]]:
    """(top-level module, line, whether the import runs when the file does) of every import, those in strings aside."""
    tree = ast.parse(source)
    deferred: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            deferred.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant):
                names = [str(argument.value)]
        found += [(name.split(".")[0], node.lineno, node not in deferred) for name in names]
    return found


def violations(file: str, source: str) -> list[str]:
    """What `file` (relative to the root) must not import."""
    package = file.split("/")[0]
    later = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    problems = []
    for module, line, at_import in imports(source):
        if module in later:
            problems.append(f"{file}:{line}: {package} must not import {module}")
        elif package == "fused_ops" and module not in OPERATORS_MAY_IMPORT:
            lazy = any(file.startswith(folder) and module == name for folder, name in LAZY)
            if any(file.startswith(folder) and module == name for folder, name in DEFINE_KERNELS):
                continue
            if not lazy:
                problems.append(f"{file}:{line}: fused_ops needs torch alone, not {module}")
            elif at_import:
                problems.append(f"{file}:{line}: import {module} inside the function that needs it")
    return problems


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"nothing to check in {package}"
    problems = [p for f in files for p in violations(f.relative_to(ROOT).as_posix(), f.read_text())]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("fused_ops/x.py", "import models.dlrm", True),
        ("fused_ops/x.py", "def f():\n    from trainers import loop", True),
        ("fused_ops/x.py", "import importlib\nimportlib.import_module('launch.train')", True),
        ("fused_ops/x.py", "import numpy", True),
        ("fused_ops/x.py", "import ctypes, torch.distributed\nfrom fused_ops import errors", False),
        ("fused_ops/backends/baseline/x.py", "import fbgemm_gpu", True),
        ("fused_ops/backends/baseline/x.py", "def f():\n    import fbgemm_gpu", False),
        ("fused_ops/backends/host/x.py", "def f():\n    import fbgemm_gpu", True),
        ("fused_ops/backends/triton/x.py", "import triton.language as tl", False),
        ("fused_ops/symmetric/x.py", "import triton", True),
        ("models/x.py", "from trainers.config import Config", True),
        ("models/x.py", "import torchrec, fused_ops", False),
        ("trainers/x.py", "import launch", True),
        ("launch/x.py", "import trainers, models, fused_ops", False),
        ("launch/x.py", "from tests.ranks import run_ranks", True),
    ],
)
def test_the_checker_catches_what_it_should(file, source, caught):
    assert bool(violations(file, source)) == caught
