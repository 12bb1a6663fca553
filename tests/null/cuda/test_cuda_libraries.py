"""The search for CUDA's libraries, on libraries that a test makes up."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from vllmx_cuda.compiler.libraries import open_companion

OUTER = """
#include <dlfcn.h>
int finds_inner(void) { return dlopen("libvxtest-inner.so.13.0", RTLD_NOW) != 0; }
"""


def test_a_library_that_looks_nowhere_finds_its_companion(tmp_path: Path) -> None:
    """NVRTC of CUDA 13.0 has no run path: it finds its builtins when they are loaded already."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    inner, outer = "libvxtest-inner.so.13.0", "libvxtest.so.13"
    (tmp_path / "inner.c").write_text("int inner = 1;")
    (tmp_path / "outer.c").write_text(OUTER)
    for source, name in (("inner.c", inner), ("outer.c", outer)):
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", name, "-ldl"]
        subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / outer))
    assert not library.finds_inner()
    open_companion(outer, "vxtest-inner")  # opened by its bare name: there is no folder to look in
    assert not library.finds_inner()
    open_companion(str(tmp_path / outer), "vxtest-inner")
    assert library.finds_inner()
