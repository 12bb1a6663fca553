"""The search for CUDA's libraries, on libraries that a test makes up."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllmx_cuda.compiler import libraries
from vllmx_cuda.compiler.libraries import include_folders, open_companion

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


@pytest.mark.parametrize(("newest", "first"), [(12, "cuda_nvrtc"), (13, "cu13"), (14, "cu13")])
def test_libraries_that_the_driver_runs_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int, first: str
) -> None:
    """Wheels of both majors are installed, as torch leaves them; the newer one is not refused."""
    for folder, version in (("cu13", "13.5.37"), ("cuda_nvrtc", "12.9.86")):
        for kind in ("lib", "include"):
            (tmp_path / folder / kind).mkdir(parents=True)
        (tmp_path / folder / "lib" / f"libnvrtc.so.{version[:2]}").touch()
        (tmp_path / folder / "include" / "cuda_bf16.h").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(libraries, "find_spec", lambda name: spec)
    monkeypatch.setattr(libraries, "_toolkits", list)
    candidates = [*libraries._candidates("nvrtc", newest)]
    assert Path(candidates[0]).parent == tmp_path / first / "lib"
    assert len([path for path in candidates if "/" in path]) == 2
    assert candidates[-2:] == [f"libnvrtc.so.{n}" for n in ((12, 13) if newest == 12 else (13, 12))]
    assert include_folders(newest=newest) == [str(tmp_path / first / "include")]
