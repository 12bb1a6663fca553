"""Every kernel compiles for every architecture, without spills and within its registers."""

from __future__ import annotations

import json

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.arch import ARCHITECTURES
from vllmx_cuda.nvrtc import Nvrtc

from .cuda_cubins import BUDGET, UNITS, faults, tool, units_of
from .cuda_matrix import matrix


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
    wrong = [
        fault for unit in units_of(arch, UNITS) for fault in faults(arch, unit, compiler, budget)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_matrix_has_every_head_size_in_both_types() -> None:
    """What `nox -s kernels` compiles; here its list alone."""
    sizes = {
        (entry, chosen["VX_DTYPE"]): {o["VX_HEAD"] for e, o in matrix()
                                      if e == entry and o["VX_DTYPE"] == chosen["VX_DTYPE"]}
        for entry, chosen in matrix() if "VX_HEAD" in chosen
    }  # fmt: skip
    everything = {64, 80, 96, 112, 128, 192, 256}
    for dtype in (1, 2):
        for entry in ("kv_store", "paged_decode", "paged_decode_mma", "paged_prefill"):
            assert sizes[entry, dtype] == everything
        assert sizes["paged_prefill_wgmma", dtype] == {64, 128, 192, 256}
    assert {entry for entry, _ in UNITS} <= {entry for entry, _ in matrix()}
    for arch in ARCHITECTURES:
        names = [unit.name for unit in units_of(arch, matrix())]
        assert len(names) == len(set(names)) > 80
