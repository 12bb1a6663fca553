"""Build hook: compiles the native library into the package, for wheels and `pip install -e`.

Without a compiler the install still succeeds: with a library of these very sources where there is
one, else as a pure Python package without any. pip hides the warning, so the probe tells what to do
when the backend is first wanted, and in `vllmx env`. A compiler that fails on our sources is an
error.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `vllmx_cpu.build` on the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = _load_builder(Path(self.root) / "src" / "vllmx_cpu" / "build.py")
        library = builder.default_output()
        if builder.built_hash(library) != builder.source_hash():
            try:
                builder.find_toolchain()
            except builder.BuildError as error:
                self.app.display_warning(f"vllmx-cpu is installed without its kernels: {error}")
                return
            builder.build(library)
        if version == "editable":
            return  # the library lies beside the sources
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(library.read_bytes())}"
        build_data["artifacts"].append(f"src/vllmx_cpu/{library.name}")


def _load_builder(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllmx_cpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


OLDEST_GLIBC = (2, 17)


def _platform_tag(library: bytes) -> str:
    """The tag of the platforms where the library runs. On Linux the tag of PEP 600 says from which
    glibc on, as the versions of the symbols that it takes from there do: PyPI refuses a plain
    linux_x86_64. Versions of another library would mean that not every system has it."""
    if library.startswith(b"MZ"):
        return "win_amd64"  # from a cross compiler too
    plain = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    names = set(re.findall(rb"\0((?:GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+)(?=\0)", library))
    versions = [tuple(map(int, name[6:].split(b"."))) for name in names if name[:6] == b"GLIBC_"]
    if not plain.startswith("linux_") or not versions or len(versions) < len(names):
        return plain
    major, minor = max(OLDEST_GLIBC, *(version[:2] for version in versions))
    return plain.replace("linux", f"manylinux_{major}_{minor}", 1)
