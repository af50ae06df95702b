"""Native libraries: compiled once, found by the hash of their sources, and a clear error where they cannot be."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fused_ops import compiler
from fused_ops.errors import BackendUnavailableError


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tiny package of sources, an empty cache, and a compiler that logs its runs."""
    native = tmp_path / "fused_ops" / "native"
    (tmp_path / "fused_ops" / "backends" / "host").mkdir(parents=True)
    native.mkdir()
    (native / "answer.h").write_text("#define ANSWER 41\n")
    (native / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER + 1; }\n')
    log = tmp_path / "runs"
    wrapper = tmp_path / "cxx"
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in --version) ;; *) echo run >> {log};; esac\nexec g++ "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path / "fused_ops")
    monkeypatch.setattr(compiler, "NATIVE", native)
    return tmp_path


def runs(tree) -> int:
    log = tree / "runs"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_compiled_once_and_again_when_a_source_or_header_changes(tree):
    import ctypes

    first = compiler.build_host_library()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert compiler.build_host_library() == first
    assert runs(tree) == 1
    (tree / "fused_ops" / "native" / "answer.h").write_text("#define ANSWER 6\n")
    second = compiler.build_host_library()
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 7
    assert runs(tree) == 2


def test_ranks_that_start_together_compile_once(tree):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compiler.build_host_library(), range(4)))
    assert len(paths) == 1
    assert runs(tree) == 1
    assert not list(compiler.cache_dir().glob("*.tmp"))


def test_a_source_that_does_not_compile_shows_the_compilers_words(tree):
    (tree / "fused_ops" / "native" / "answer.cpp").write_text("this is not C++\n")
    with pytest.raises(BackendUnavailableError, match=r"compiling the host library failed(.|\n)*answer.cpp"):
        compiler.build_host_library()


def test_no_compiler_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailableError, match=r"looked for no-such-compiler.*install g\+\+ or set CXX"):
        compiler.build_host_library()


def test_no_nvcc_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    with pytest.raises(BackendUnavailableError, match="needs nvcc"):
        compiler.build_cuda_library("sm_90a")


def build(*targets: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "fused_ops.build", *targets],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=compiler.PACKAGE.parent,
    )


def test_build_ahead_of_time(tmp_path):
    done = build("host", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "fused_ops").glob("host-*.so"))


@pytest.mark.parametrize("targets", [[], ["gpu"]])
def test_build_says_what_it_takes(targets):
    done = build(*targets)
    assert done.returncode != 0
    assert "usage: python -m fused_ops.build host | ARCH" in done.stderr
