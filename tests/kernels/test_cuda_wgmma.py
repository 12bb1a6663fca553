"""Hopper's products of a warpgroup on the emulator: the twins compute what PTX's documentation
says, and the checker finds what a GPU would answer with wrong numbers or not at all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_cuda.kernel_specs import KERNELS, Kernel, Launch
from vllmx_cuda.kernel_specs.types import arguments
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator, KernelFault, empty

from .cuda_arrays import Array, normal, options, wide


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_wrappers(emulator: Emulator, dtype: str) -> None:
    random = np.random.default_rng(9)
    a, b = (normal(random, (rows, 128), dtype) for rows in (64, 128))
    scores, values = (empty((64, 192), np.float32) for _ in range(2))
    powers = empty(128, np.float32)
    variant = KERNELS["wgmma_wrappers"].variant(**options(dtype))
    emulator.launch(variant, {}, [a, b, scores, values, powers])
    rows, columns = wide(a) @ wide(b).T, wide(a) @ wide(b)
    near = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(scores, np.hstack([rows, rows[:, 64:]]), **near)
    np.testing.assert_allclose(values, np.hstack([columns, 2 * columns[:, 64:]]), **near)
    first = scores[:, 0].astype(np.float64) / 8
    np.testing.assert_allclose(powers, np.exp2(np.concatenate([first, -first])), rtol=1e-6)


def test_wrappers_are_of_one_architecture() -> None:
    variant = KERNELS["wgmma_wrappers"].variant(**options("bf16"))
    assert [arch for arch in (75, 80, 89, 90, 100, 120) if variant.runs_on(arch)] == [90]


def test_what_a_gpu_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/gpu/wgmma.py on the emulator: right as things are, and it says where they are not."""
    script = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "wgmma.py"
    spec = importlib.util.spec_from_file_location("wgmma", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wgmma", module)
    spec.loader.exec_module(module)
    device = EmulatedDevice()
    case = module.Case(((90, 20), (70, 3)), dtype="f16", heads=6, kv_heads=2, size=64, sinks=True)
    assert module.report(device, [case], [case], 1)
    monkeypatch.setitem(module.TOLERANCE, "f16", 0.0)
    assert not module.report(device, [case], [], 1)


FAULTS = {
    1: "no fence.proxy.async between",
    2: "uninitialised shared memory|race on shared memory|while a cp.async to it is in flight",
    3: "no wgmma.fence since registers",
    4: "read of a register that a wgmma in flight sums in",
    5: "while a cp.async to it is in flight",
    7: "misaligned, it begins 128 bytes behind",
    8: "not 16-byte aligned",
    9: "swizzle mode 2",
    10: "deadlock: .* in (wgmma|__syncthreads)|not all threads of the warpgroup are there",
    11: "met in different operations or operands",
    12: "uninitialised|not dynamic shared memory|runs past dynamic shared memory",
    14: "write of shared memory .* while a wgmma reads it",
    15: "read of a register that a wgmma in flight sums in",
    16: "write of a register that a wgmma in flight sums in",
    17: "wgmma that nobody waited for",
    19: "write of shared memory .* while a wgmma reads it",
    20: "write of a register that a wgmma in flight reads",
    18: "race on shared memory .*: write after thread -2",
}
WRONG = {6: "rows that are not swizzled", 13: "a stride between groups of rows"}


def run_fault(emulator: Emulator, fault: int) -> tuple[Array, Array]:
    """(got, want) of the product of tests/kernels/cuda_wgmma_faults.cu."""
    own = Emulator(check=True, order=emulator.order, folder=Path(__file__).parent)
    kernel = Kernel(
        entry="wgmma_fault",
        source="cuda_wgmma_faults.cu",
        options={"VX_DTYPE": (2,)},
        arguments=arguments("in elem* x, out f32* y, i32 fault"),
        sizes=(),
        rule=lambda sizes, options: Launch((1, 1, 1), 256, 64 * 64 * 2 + 128),
    )
    x, y = normal(np.random.default_rng(2), (64, 64), "bf16"), empty((64, 64), np.float32)
    own.launch(kernel.variant(VX_DTYPE=2), {}, [x, y, fault])
    return y, wide(x) @ wide(x).T


def test_what_is_right_passes(emulator: Emulator) -> None:
    got, want = run_fault(emulator, 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(emulator: Emulator, fault: int) -> None:
    with pytest.raises(KernelFault, match=FAULTS[fault]):
        run_fault(emulator, fault)


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_layouts_give_wrong_numbers(emulator: Emulator, fault: int) -> None:
    got, want = run_fault(emulator, fault)
    assert abs(got - want).max() > 1, WRONG[fault]


def test_other_architectures_have_no_variant() -> None:
    with pytest.raises(ConfigError, match="no variant VX_DTYPE=0"):
        KERNELS["wgmma_wrappers"].variant(VX_DTYPE=0)
