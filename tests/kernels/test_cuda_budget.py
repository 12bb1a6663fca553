"""Every kernel compiles for every architecture, without spills and within its registers."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.compiler.cubins import Unit
from vllmx_cuda.compiler.nvrtc import Nvrtc
from vllmx_cuda.device.arch import ARCHITECTURES
from vllmx_cuda.kernel_specs.types import PLAIN

from .cuda_cubins import BUDGET, UNITS, digest, faults, unchecked, units_of
from .cuda_matrix import matrix
from .cuda_sass import tool

ALWAYS, STRIDE = "sm_90a", 6
"""Where each sixth unit is compiled in each run, if nothing has changed: what runs here need not be
what was noted."""
WGMMA = ("paged_prefill_wgmma", {"VX_DTYPE": 2, "VX_HEAD": 64, "VX_GROUP": 1})


@pytest.fixture(scope="session")
def compiler() -> Nvrtc:
    try:
        return Nvrtc.open()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_keep_their_budget(arch: str, compiler: Nvrtc) -> None:
    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        pytest.skip("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    budget = json.loads(BUDGET.read_text())
    units = units_of(arch, UNITS)
    sample = units[::STRIDE] if arch == ALWAYS else []
    units = list(dict.fromkeys([*sample, *unchecked(arch, units, compiler, budget)]))
    with ThreadPoolExecutor(2) as pool:  # most of the time goes into other processes and NVRTC
        found = pool.map(lambda unit: faults(arch, unit, compiler, budget), units)
        wrong = [fault for faults_of_unit in found for fault in faults_of_unit]
    assert not wrong, "\n".join(wrong)


def test_a_changed_kernel_is_checked_again(compiler: Nvrtc, tmp_path: Path) -> None:
    """One of its headers, and its budget."""
    budget = json.loads(BUDGET.read_text())
    [unit] = units_of("sm_80", [("rms_norm", {"VX_DTYPE": 2, "VX_VEC": 8})])
    known = digest("sm_80", unit, compiler, budget)
    for copy, end in (("same", ""), ("changed", "\n")):
        shutil.copytree(unit.source.parent, tmp_path / copy)
        header = tmp_path / copy / "row_norm.h"
        header.write_text(header.read_text() + end)
        copied = Unit(tmp_path / copy / unit.source.name, unit.defines)
        assert (digest("sm_80", copied, compiler, budget) == known) is (copy == "same")
    lower = {name: {arch: most - 1 for arch, most in row.items()} for name, row in budget.items()}
    assert digest("sm_80", unit, compiler, lower) != known


_TAKES = "const float (&s)[KEYS / 2], const float (&factor)[2]) {\n"
_WEIGHS = "first);\n    weigh(s, m, factor);\n"
SERIAL = {
    "the wait ends a step": [
        (f"{_TAKES}  vx_wgmma_wait<0>();\n", _TAKES),
        (_WEIGHS, f"{_WEIGHS}    vx_wgmma_wait<0>();\n"),
    ],
    "all is waited for": [("    vx_wgmma_wait<1>();\n", "    vx_wgmma_wait<0>();\n")],
}


@pytest.mark.parametrize("what", SERIAL)
def test_a_softmax_that_waits_is_found(what: str, compiler: Nvrtc, tmp_path: Path) -> None:
    """The numbers are right then, and nothing but the order of the instructions shows it."""
    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        pytest.skip("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    name, [unit] = "paged_prefill_wgmma.cu", units_of("sm_90a", [WGMMA])
    shutil.copytree(unit.source.parent, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / name).read_text()
    for old, new in SERIAL[what]:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / name).write_text(text)
    assert not faults("sm_90a", unit, compiler, None)
    [fault] = faults("sm_90a", Unit(tmp_path / name, unit.defines), compiler, None)
    assert "the softmax waits" in fault


def test_a_ring_that_drains_is_found(compiler: Nvrtc, tmp_path: Path) -> None:
    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        pytest.skip("pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    options = {"VX_DTYPE": 2, "VX_TILES": 1, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}
    [unit] = units_of("sm_90a", [("linear_mma", options)])
    shutil.copytree(unit.source.parent, tmp_path, dirs_exist_ok=True)
    loop = tmp_path / "mma_tile.h"
    right = loop.read_text()
    loop.write_text(right.replace("vx_cp_wait<IN_FLIGHT - 1>", "vx_cp_wait<0>"))
    assert loop.read_text() != right
    assert not faults("sm_90a", unit, compiler, None)
    found = faults("sm_90a", Unit(tmp_path / unit.source.name, unit.defines), compiler, None)
    assert len(found) == 1
    assert "waits for all copies" in found[0]


def test_the_matrix_has_every_head_size_in_both_types() -> None:
    """What `nox -s kernels` compiles; here its list alone."""
    sizes = {
        (entry, chosen["VX_DTYPE"]): {
            o["VX_HEAD"] for e, o in matrix() if e == entry and o["VX_DTYPE"] == chosen["VX_DTYPE"]
        }
        for entry, chosen in matrix()
        if "VX_HEAD" in chosen
    }
    everything = {64, 80, 96, 112, 128, 192, 256}
    for dtype in (1, 2):
        for entry in ("kv_store", "paged_decode", "paged_prefill"):
            assert sizes[entry, dtype] == {*everything, 512}
        assert sizes["paged_decode_mma", dtype] == everything
        assert sizes["paged_prefill_wgmma", dtype] == {64, 128, 192, 256}
    assert {entry for entry, _ in UNITS} <= {entry for entry, _ in matrix()}
    for arch in ARCHITECTURES:
        names = [unit.name for unit in units_of(arch, matrix())]
        assert len(names) == len(set(names)) > 80
