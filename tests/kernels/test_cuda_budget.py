"""Every kernel compiles for every architecture, without spills and within its registers."""

from __future__ import annotations

import json

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.arch import ARCHITECTURES
from vllmx_cuda.nvrtc import Nvrtc

from .cuda_cubins import BUDGET, build, key, measure, tool, units_of

# What must be among the instructions of an entry, on these architectures.
DISASSEMBLED = ("sm_80", "sm_90a", "sm_120a")
WANTED = {
    "rms_norm": ("LDG.E.128", "STG.E.128"),
    "add_rms_norm": ("LDG.E.128", "STG.E.128"),
    "layer_norm": ("LDG.E.128", "STG.E.128"),
    "kv_store": ("LDG.E.64",),
    "paged_decode": ("LDG.E.128",),
    "paged_decode_mma": ("LDG.E.", "HMMA.16816.F32.BF16"),
    "paged_prefill": (
        "HMMA.16816.F32.BF16", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128",
    ),
    "gated_act": ("LDG.E.128", "STG.E.128"),
    "add": ("LDG.E.128", "STG.E.128"),
    "gather_rows": ("LDG.E.128", "STG.E.128"),
    "linear_gemv": ("LDG.E.NA.LTC",),
    "gguf_gemv": ("IDP.4A",),
    "w4_linear": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32"),
    "w4_dequantize": ("LDG.E.", "STG.E.128"),
    "linear_mma": ("LDG.E.NA.LTC", "HMMA.16816.F32.BF16"),
}  # fmt: skip


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
    wrong = []
    for unit in units_of(arch):
        cubin = build(arch, compiler, unit)
        for entry, usage in measure(cubin, disassembled=arch in DISASSEMBLED).items():
            name = f"{key(entry, unit)} on {arch}"
            if usage["stack"] or usage["local"]:
                wrong.append(f"{name}: {usage['stack']} bytes of stack, {usage['local']} local")
            allowed = budget[key(entry, unit)][arch]
            if usage["registers"] > allowed:
                wrong.append(f"{name}: {usage['registers']} registers, the budget is {allowed}")
            missing = [
                wanted
                for wanted in WANTED.get(entry, ())
                if arch in DISASSEMBLED and not any(wanted in found for found in usage["sass"])
            ]
            if missing:
                wrong.append(f"{name}: no {', '.join(missing)} among {sorted(usage['sass'])}")
    assert not wrong, "\n".join(wrong)
