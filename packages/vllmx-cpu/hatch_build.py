"""Build hook: compiles the native library into the package, for wheels and `pip install -e`.

Without a compiler the install still succeeds, as a pure Python package whose probe tells what to
do; a compiler that fails on our sources is an error.
"""

from __future__ import annotations

import importlib.util
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
        try:
            builder.find_toolchain()
        except builder.BuildError as error:
            self.app.display_warning(f"vllmx-cpu is installed without its kernels: {error}")
            return
        builder.ensure_built()
        if version == "editable":
            return  # the library lies beside the sources
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["artifacts"].append(f"src/vllmx_cpu/{builder.LIBRARY.name}")


def _load_builder(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllmx_cpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
