"""`mx.fast.metal_kernel` on the CPU: the same arguments, a function that g++ compiled instead."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")
HERE = Path(__file__).parent
TYPES = {
    "float32": "float",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int32": "int32_t",
    "uint32": "uint",
}
COMPILE = ("g++", "-O1", "-std=c++17", "-fPIC")
SIGNATURE = """#include "{shim}"
{header}
{constants}
static void kernel_body({parameters}, uint3 threadgroup_position_in_grid,
    uint3 threadgroups_per_grid, uint simdgroup_index_in_threadgroup,
    uint thread_index_in_simdgroup) {{
{source}
}}
extern "C" long run(void** arrays, int** shapes, uint x, uint y, uint z, uint threads) {{
  shim::divergences = 0;
  for (uint c = 0; c < z; c++) for (uint b = 0; b < y; b++) for (uint a = 0; a < x; a++)
    shim::run_group(threads, [&](uint i) {{
      kernel_body({arguments}, uint3{{a, b, c}}, uint3{{x, y, z}}, i / 32, i % 32);
    }});
  return shim::divergences;
}}
"""


KERNELS = files("vllmx_metal") / "kernels"
UseShim = Callable[..., "ShimKernel"]
"""use(source): the module under test runs this source from now on, by default its own."""


def source_of(name: str) -> str:
    """The source of a kernel."""
    return (KERNELS / f"{name}.metal").read_text()


def shim_of(module: Any, name: str) -> Any:
    """A fixture that is a `UseShim` of this kernel, which `module` launches."""

    @pytest.fixture
    def shim(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> UseShim:
        folder, header = tmp_path_factory.getbasetemp() / "metal", KERNELS / "page_value.h"
        folder.mkdir(exist_ok=True)

        def use(source: str = source_of(name)) -> ShimKernel:
            made = ShimKernel(folder, module.INPUTS, module.OUTPUTS, source, header.read_text())
            monkeypatch.setattr(module, "kernel", lambda: made)
            return made

        return use

    return shim


class ShimKernel:
    """What `metal_kernel` returns, but computed at once."""

    def __init__(
        self, folder: Path, inputs: Sequence[str], outputs: Sequence[str], source: str, header: str
    ) -> None:
        if shutil.which("g++") is None:
            pytest.skip("the shim needs g++")
        self._folder, self._inputs, self._outputs = folder, inputs, outputs
        self._source, self._header = source, header
        self.divergences = 0
        self.builds = 0

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
    ) -> list[Any]:
        assert grid[0] % threadgroup[0] == 0, "a part of a threadgroup"
        assert threadgroup[1:] == (1, 1)
        arrays = [_host(array) for array in inputs]
        assert set(output_dtypes) == {mx.float32}
        results = [np.full(shape, np.nan, np.float32) for shape in output_shapes]
        types = [_type_name(array.dtype) for array in inputs] + ["float"] * len(results)
        library = self._build(template, types)
        every = [*arrays, *results]
        shapes = [np.array(array.shape, np.int32) for array in every]
        self.divergences += library.run(
            (ctypes.c_void_p * len(every))(*(array.ctypes.data for array in every)),
            (ctypes.c_void_p * len(every))(*(shape.ctypes.data for shape in shapes)),
            grid[0] // threadgroup[0],
            grid[1],
            grid[2],
            threadgroup[0],
        )
        return [mx.array(result) for result in results]

    def _build(self, template: Sequence[tuple[str, Any]], types: Sequence[str]) -> Any:
        names = [*self._inputs, *self._outputs]
        constants = [
            f"typedef {_type_name(value)} {name};"
            if isinstance(value, mx.Dtype)
            else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
            for name, value in template
        ]
        const = ["const "] * len(self._inputs) + [""] * len(self._outputs)
        text = SIGNATURE.format(
            shim=_parsed_shim(self._folder),
            header=self._header,
            source=self._source,
            constants="\n".join(constants),
            parameters=", ".join(
                f"{c}{kind}* {name}, const int* {name}_shape"
                for c, kind, name in zip(const, types, names, strict=True)
            ),
            arguments=", ".join(
                f"({kind}*)arrays[{i}], shapes[{i}]" for i, kind in enumerate(types)
            ),
        )
        path = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not path.with_suffix(".so").exists():
            self.builds += 1
            path.with_suffix(".cpp").write_text(text)
            subprocess.run(
                [*COMPILE, "-shared", "-Wall", "-Wextra", "-Winvalid-pch",
                 "-Wno-unused-parameter", "-Wno-sign-compare", "-Wno-unused-but-set-variable",
                 "-Werror", "-o",
                 path.with_suffix(".so"), path.with_suffix(".cpp")],
                check=True, timeout=300,
            )  # fmt: skip
        library = ctypes.CDLL(str(path.with_suffix(".so")))
        library.run.restype = ctypes.c_long
        return library


def _parsed_shim(folder: Path) -> Path:
    """The shim in this folder, and beside it what g++ made of it: most of each build otherwise."""
    header = folder / "metal_shim.h"
    if not header.exists():
        shutil.copyfile(HERE / header.name, header)
        parsed = header.with_suffix(".h.gch")
        subprocess.run([*COMPILE, "-x", "c++-header", "-o", parsed, header], check=True)
    return header


def _type_name(dtype: Any) -> str:
    return TYPES[str(dtype).removeprefix("mlx.core.")]


def _host(array: Any) -> Any:
    """Contiguous numpy of the same bits."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.array(array))
