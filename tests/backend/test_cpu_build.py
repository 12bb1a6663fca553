"""Building the native library: real compiler runs on a small source tree, and what goes wrong."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cpu import build, native, plugin

PER_ISA = """// VX: per instruction set
#define NAME2(isa) answer_##isa
#define NAME(isa) NAME2(isa)
extern "C" int NAME(VX_ISA)() { return 42; }
"""
ONCE = """
extern "C" __attribute__((visibility("default"))) const char* marker() { return VX_SOURCE_MARKER; }
#define VX_X(name) extern "C" int answer_##name();
VX_ISA_LIST
#undef VX_X
extern "C" __attribute__((visibility("default"))) int total() {
  int sum = 0;
#define VX_X(name) sum += answer_##name();
  VX_ISA_LIST
  return sum;
}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two sources in place of the real one."""
    folder = tmp_path / "package" / "native"
    folder.mkdir(parents=True)
    (folder / "kernel.cpp").write_text(PER_ISA)
    (folder / "once.cpp").write_text(ONCE)
    monkeypatch.setattr(build, "NATIVE", folder)
    monkeypatch.setattr(build, "PACKAGE", folder.parent)
    monkeypatch.setattr(build, "LIBRARY", folder.parent / "lib.so")
    return folder


@pytest.fixture
def compiler() -> build.Toolchain:
    try:
        return build.find_toolchain()
    except build.BuildError as error:
        pytest.skip(str(error))


def test_the_builder_runs_where_nothing_is_installed() -> None:
    """The hook that builds the wheel loads it in an environment of its own."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='build')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, build.__file__], check=True)


def test_each_source_is_compiled_once_for_each_instruction_set(
    tree: Path, compiler: build.Toolchain
) -> None:
    output = tree.parent / "other.so"
    build.build(output)
    library = ctypes.CDLL(str(output))
    assert library.total() == 42 * len(compiler.isas)
    assert build.built_hash(output) == build.source_hash()


def test_a_change_of_the_sources_makes_the_library_stale(
    tree: Path, compiler: build.Toolchain
) -> None:
    told: list[tuple[int, int]] = []
    assert build.ensure_built(lambda done, total: told.append((done, total)))
    assert told == [(done, len(told)) for done in range(1, len(compiler.isas) + 2)]
    assert not build.ensure_built()
    (tree / "new.h").write_text("// a header counts too\n")
    assert build.built_hash() != build.source_hash()
    assert build.ensure_built()


def test_objects_are_kept_and_stale_ones_removed(tree: Path, compiler: build.Toolchain) -> None:
    objects = tree.parent / "objects"
    build.build(objects=objects)
    first = {path: path.stat().st_mtime_ns for path in objects.glob("*.o")}
    (tree / "once.cpp").write_text(ONCE + "// changed\n")
    build.build(objects=objects)
    second = {path: path.stat().st_mtime_ns for path in objects.glob("*.o")}
    kept = {path.name.split(".")[0] for path in first.keys() & second.keys()}
    assert kept == {"kernel"}
    assert len(first) == len(second)
    assert all(second[path] == first[path] for path in first.keys() & second.keys())


def test_a_header_concerns_the_sources_that_include_it(
    tree: Path, compiler: build.Toolchain
) -> None:
    """A header that is included through another one counts as well."""
    (tree / "outer.h").write_text('#pragma once\n#include "inner.h"\n#include "outer.h"\n')
    (tree / "inner.h").write_text("// nothing\n")
    (tree / "user.cpp").write_text(f'{build.PER_ISA}\n# include "outer.h"\n')
    objects = tree.parent / "objects"
    build.build(objects=objects)
    first = set(objects.glob("*.o"))
    (tree / "inner.h").write_text("// changed\n")
    build.build(objects=objects)
    second = set(objects.glob("*.o"))
    assert {path.name.split(".")[0] for path in second - first} == {"user", "once"}
    assert {path.name.split(".")[0] for path in second & first} == {"kernel"}


def test_what_the_compiler_says_is_shown(
    tree: Path, compiler: build.Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    (tree / "once.cpp").write_text("int broken( {")
    assert build.main([]) == 1
    assert "once.cpp" in caplog.text
    assert "error" in caplog.text
    assert not build.LIBRARY.exists()


def test_without_a_compiler_the_message_says_what_to_install(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "built_hash", lambda: None)
    with pytest.raises(build.BuildError, match=r"apt install g\+\+.*python -m vllmx_cpu.build"):
        build.find_toolchain()
    reason = plugin.probe()
    assert reason is not None
    assert "apt install g++" in reason
    native.library.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="no C\\+\\+ compiler was found"):
            native.library()
    finally:
        native.library.cache_clear()


def test_cxx_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    with pytest.raises(build.BuildError, match="CXX names 'no-such-compiler-anywhere'"):
        build.find_toolchain()


def test_a_cross_compiler_says_what_it_compiles_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cxx"
    script.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(script))
    for target, isas in build.ISA_FLAGS.items():
        answer = f"echo {target}-any-os"
        script.write_text(f'#!/bin/sh\n[ "$1" = -dumpmachine ] && {answer} || echo 1.0\n')
        assert build.find_toolchain().isas == isas


def test_a_compiler_for_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clang is taken, without AMX and with Zig's name of the baseline; GCC is refused."""
    script = tmp_path / "cxx-windows"
    script.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(script))
    target = '[ "$1" = -dumpmachine ] && echo x86_64-unknown-windows-gnu'
    script.write_text(f"#!/bin/sh\n{target} || echo clang version 22\n")
    found = build.find_toolchain()
    assert found.is_for_windows
    assert list(found.isas) == [name for name in build.ISA_FLAGS["x86_64"] if name != "amx"]
    assert found.isas["portable"] == ("-march=x86_64", "-O2")
    with pytest.raises(build.BuildError, match=r"22 compiles for Windows, not lib\.so: set CXX"):
        build.build(tmp_path / "lib.so")
    script.write_text(f"#!/bin/sh\n{target} || echo g++ 14\n")
    with pytest.raises(build.BuildError, match=r"g\+\+ 14 keeps the stack .* ziglang"):
        build.find_toolchain()


def test_cxx_names_what_is_built_and_not_what_is_loaded() -> None:
    """A cross compiler for Windows in the environment does not change the backend of this one."""
    code = "from vllmx_cpu import build; print(build.LIBRARY.name, build.default_output().name)"
    for compiler, built in (("x86_64-w64-mingw32-g++", "vllmx_cpu.dll"), ("", build.LIBRARY.name)):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"CXX": compiler},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.split() == [build.LIBRARY.name, built]


def test_a_compiler_that_refuses_everything_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cxx"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "old 1.0" && exit 0\necho too old >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(build.BuildError, match=r"old 1\.0 cannot compile .*too old.*GCC 10"):
        build.find_toolchain()


def test_the_probe_is_content_with_a_library_that_is_there() -> None:
    if build.LIBRARY.exists():
        assert plugin.probe() is None
