"""The CUDA sources compiled by g++ for the emulator's threads, with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fused_ops.compiler import NATIVE, PACKAGE, cache_dir, find_nvcc

HERE = Path(__file__).parent
KERNELS = PACKAGE / "backends" / "cuda"
FLAGS = [
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr,null,object-size,nonnull-attribute,returns-nonnull-attribute",  # the address sanitizer's part
    "-fno-sanitize-recover=all",
    "-Wno-attributes",
    "-Wno-unknown-pragmas",
]
# What only nvcc understands, and the emulator's word for it.
INLINE_PTX = {
    "ld.acquire.sys.global.u64 %0, [%1];": "v = emulator::load(p)",
    "ld.relaxed.sys.global.u64 %0, [%1];": "v = emulator::load(p)",
    "st.release.sys.global.u64 [%0], %1;": "emulator::store(p, v)",
    "mov.u64 %0, %globaltimer;": "t = emulator::clock_ns()",
    "": "",
    "atom.add.acq_rel.sys.global.u32 %0, [%1], %2;": "before = emulator::add(counter, value)",
    # cuda_packets.cuh
    "{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }": "emulator::load_16(p, &low, &high)",
    "{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }": "emulator::store_16(p, low, high)",
    "st.relaxed.sys.global.u64 [%0], %1;": "emulator::store(p, v)",
    # cuda_gemv.cuh
    "{ .reg .pred p; setp.ne.s32 p, %5, 0; @p "
    "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4]; }": "emulator::load_vector(to, from, read)",
    "{ .reg .pred p; setp.ne.s32 p, %3, 0; @p "
    "ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2]; }": "emulator::load_vector(to, from, read)",
    "cp.async.ca.shared.global [%0], [%1], 4, %2;": "(void)shared, emulator::copy_4_later(to, from, bytes)",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": "(void)shared, emulator::load_matrices(to, row)",
    "cp.async.wait_all;": "emulator::do_copies()",
} | {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{%0, %1, %2, %3};": f"emulator::multiply_tile<{element}>(c, a, b0, b1)"
    for name, element in (("bf16", "__nv_bfloat16"), ("f16", "__half"))
}
ASM = re.compile(r'asm volatile\("([^"]*)".*?\);')
LAUNCH = re.compile(r"([\w:]+(?:<[^;=?]*?>)?)\s*<<<(.*?)>>>\(")
DYNAMIC_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
SHARED = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]*\])?);")


def for_the_emulator(source: str) -> str:
    """The source with the few things replaced that are not C++; a line stays at its number."""
    source = ASM.sub(lambda m: INLINE_PTX[m[1]] + ";", source)
    source = LAUNCH.sub(_launch, source)
    source = DYNAMIC_SHARED.sub(r"\1* \2 = emulator::dynamic_shared<\1>();", source)
    return SHARED.sub(r'using Shared_\2 = \1\3; auto& \2 = emulator::shared_variable<Shared_\2>("\2");', source)


def _launch(match: re.Match[str]) -> str:
    grid, block, shared, stream = (part.strip() for part in match[2].split(",", 3))
    newlines = match[0].count("\n") * "\n"
    return f"emulator::launch_kernel({match[1]}, {grid}, {block}, {shared}, {stream}, {newlines}"


def build() -> Path:
    """A library with the C interface of the CUDA one, and emulator_hold, emulator_run and emulator_shuffle."""
    sources = [*sorted(KERNELS.glob("*.cu")), *sorted(NATIVE.glob("*.cuh"))]
    own = [HERE / "simt.cpp", *sorted(HERE.glob("include/**/*.*h")), Path(__file__)]
    digest = hashlib.sha256()
    for path in sources + own:
        digest.update(path.name.encode() + path.read_bytes())
    target = cache_dir() / f"emulator-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = _compile(sources, Path(folder))
        os.replace(partial, target)
    return target


def _compile(sources: list[Path], folder: Path) -> Path:
    units = [HERE / "simt.cpp"]
    for path in sources:
        copy = folder / (path.name + ".cpp" if path.suffix == ".cu" else path.name)
        copy.write_text(f'#line 1 "{path}"\n' + for_the_emulator(path.read_text()))
        if path.suffix == ".cu":
            units.append(copy)
    units.sort(key=lambda unit: unit.stat().st_size, reverse=True)  # the longest first, since cores are few
    include = [f"-I{folder}", f"-I{HERE / 'include'}", *_toolkit_include()]
    objects = [folder / f"{unit.stem}.o" for unit in units]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, (["g++", *FLAGS, *include, "-c", "-o", o, u] for o, u in zip(objects, units, strict=True))))
    library = folder / "library.so"
    _run(["g++", *FLAGS, "-shared", "-o", library, *objects])
    return library


def sanitizers() -> str:
    """What LD_PRELOAD has to name in the process that loads the library."""
    # The C++ library too: the sanitizer looks for its exceptions when it starts.
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    return ":".join(done.stdout.strip() for done in found)


def _toolkit_include() -> list[str]:
    """Where nvcc would find cuda_fp16.h."""
    nvcc = find_nvcc()
    assert nvcc is not None, "the emulator needs the headers of a CUDA toolkit, and no nvcc was found"
    said = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True
    )
    line = next(line for line in said.stderr.splitlines() if "INCLUDES=" in line)
    return [f"-isystem{path}" for path in re.findall(r"-I([^\" ]+)", line)]


def _run(command: list) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(str(word) for word in command)}\n{done.stderr[:6000]}"
