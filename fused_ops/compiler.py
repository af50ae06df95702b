"""Compile the native sources: on first use, cached by their hash, or ahead of time.

The libraries have a plain C interface and include no torch header, so they build in seconds and load beside any
torch. `python -m fused_ops.build` compiles ahead of time.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fused_ops.errors import BackendUnavailableError

PACKAGE = Path(__file__).parent
NATIVE = PACKAGE / "native"
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-Wall",
    "-Wextra",
]
NVCC_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Xcompiler", "-fPIC", "-cudart", "shared"]


def cache_dir() -> Path:
    """Where compiled libraries are kept: `$XDG_CACHE_HOME/fused_ops`, by default `~/.cache/fused_ops`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused_ops"


@functools.cache
def load_host_library() -> ctypes.CDLL:
    """The host backend: shared-memory protocol and its operators (needs a C++17 compiler the first time)."""
    return ctypes.CDLL(str(build_host_library()))


@functools.cache
def load_cuda_library(arch: str) -> ctypes.CDLL:
    """The CUDA backend compiled for one architecture, such as `sm_90a` (needs nvcc the first time)."""
    return ctypes.CDLL(str(build_cuda_library(arch)))


def build_host_library() -> Path:
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BackendUnavailableError(
            "the host backend needs a C++17 compiler once, and none was found "
            f"(looked for {os.environ.get('CXX') or 'g++, clang++, c++'}): install g++ or set CXX"
        )
    sources = sorted(NATIVE.glob("*.cpp")) + sorted((PACKAGE / "backends" / "host").glob("*.cpp"))
    headers = sorted(NATIVE.glob("*.h"))
    return _compile("host", [compiler, *CXX_FLAGS], sources, headers, _cpu_identity())


def build_cuda_library(arch: str) -> Path:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BackendUnavailableError(
            "the cuda backend needs nvcc once, and none was found: install the CUDA toolkit that matches "
            "torch.version.cuda and put nvcc on PATH (or set CUDA_HOME)"
        )
    number = arch.removeprefix("sm_")
    sources = sorted(NATIVE.glob("*.cu")) + sorted((PACKAGE / "backends" / "cuda").glob("*.cu"))
    headers = sorted(NATIVE.glob("*.cuh"))
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    return _compile(f"cuda_{arch}", [nvcc, *NVCC_FLAGS, target], sources, headers, "", _each_on_its_own)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or next((p for p in ["/usr/local/cuda/bin/nvcc"] if Path(p).exists()), None)


def _all_at_once(command: list[str], sources: list[Path], target: Path) -> None:
    _run([*command, "-shared", "-o", str(target), *map(str, sources)])


def _each_on_its_own(command: list[str], sources: list[Path], target: Path) -> None:
    """As many compilers at a time as there are cores, then the linker."""
    objects = [target.with_suffix(f".{source.stem}.o") for source in sources]
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = ([*command, "-c", "-o", str(o), str(s)] for s, o in zip(sources, objects, strict=True))
            list(pool.map(_run, commands))
        _run([*command, "-shared", "-o", str(target), *map(str, objects)])
    finally:
        for o in objects:
            o.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BackendUnavailableError(f"{' '.join(command)}\n{done.stderr}")


def _compile(
    name: str,
    command: list[str],
    sources: list[Path],
    headers: list[Path],
    salt: str,
    build: Callable[[list[str], list[Path], Path], None] = _all_at_once,
) -> Path:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256("\0".join([*command, version, salt]).encode())
    for path in sources + headers:
        digest.update(path.name.encode() + path.read_bytes())
    target = cache_dir() / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together: one compiles, the others find its result
        if target.exists():
            return target
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            build([*command, f"-I{NATIVE}"], sources, partial)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(f"compiling the {name} library failed:\n{error}") from None
        os.replace(partial, target)
    return target


def _cpu_identity() -> str:
    """What `-march=native` depends on, so that hosts of different kinds can share one cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
