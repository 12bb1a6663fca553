"""Products with dense matrices on the emulated device: which kernel, which blocks, which bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from vllmx_core.ops.op import OpList
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.matrices.dense import Dense
from vllmx_cuda.matrices.form import Operands, ProductScratch, Segment, Target
from vllmx_cuda.program import planning
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulated_products import array
from vllmx_testing.cuda.emulator import Emulator

from .cuda_models import CountingDevice, Quantised, _can_emulate, generate, log_probabilities

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator(check=True)


@dataclass
class Ops:
    """`vllmx_cuda.matrices.form.Ops`"""

    device: EmulatedDevice
    target: Target
    products: ProductScratch

    def variant(self, entry: str, **options: int) -> Variant:
        return KERNELS[entry].variant(VX_DTYPE=DTYPES[self.target.dtype], **options)


class LaunchLog(EmulatedDevice):
    """Remembers what was launched, in how many blocks."""

    def launch(self, variant, sizes, arguments) -> None:  # type: ignore[no-untyped-def]
        self.launched = variant.kernel.entry, variant.launch(sizes).grid
        super().launch(variant, sizes, arguments)


def uploaded(device: EmulatedDevice, values: np.ndarray) -> Memory:
    memory = device.empty(values.nbytes)
    array(memory, np.uint8)[...] = values.reshape(-1).view(np.uint8)
    return memory


@pytest.mark.parametrize(
    ("arch", "cols", "blocks"),
    [
        ("sm_90a", 4096, (3, 1, 2)),
        ("sm_90a", 96, (3, 1, 1)),
        ("sm_90a", 100, (5, 1, 1)),
        ("sm_75", 4096, (5, 1, 1)),
    ],
)
def test_few_tokens(arch: str, cols: int, blocks: tuple[int, ...]) -> None:
    """A part of a wider product; tokens that share a step do not change each other's bits, and what
    a split product leaves behind does not disturb the next."""
    device, rows, pitch = LaunchLog(emulator=EMULATOR, num_processors=12, arch=arch), 19, 24
    form, target = Dense("bf16"), Target("bf16", 75 if arch == "sm_75" else 90)
    need, rng = form.scratch(rows, cols, 64), np.random.default_rng(cols)
    scratch = ProductScratch(
        device.empty(0), device.empty(0), device.empty(need.work), device.zeros(need.counters)
    )
    x, w = (f32_to_bf16(rng.standard_normal((n, cols)).astype(np.float32)) for n in (17, rows))
    bias = rng.standard_normal(rows).astype(np.float32)
    of_x, of_y, of_w = uploaded(device, x), device.empty(17 * pitch * 4), uploaded(device, w)
    operands = Operands(of_x, of_y, pitch, "f32", uploaded(device, bias))
    segment = Segment(form, of_w, 0, rows, cols)
    product = form.product(Ops(device, target, scratch), segment, operands)
    want = bf16_to_f32(x).astype(np.float64) @ bf16_to_f32(w).astype(np.float64).T + bias
    alone: list[np.ndarray] = []
    for m in (1, 2, 8, 9, 16, 17):
        if arch == "sm_75" and m > 8:
            continue  # cuBLASLt's
        product.enqueue(m)
        y = array(of_y, np.float32)[: m * pitch].reshape(m, pitch)[:, :rows].copy()
        np.testing.assert_allclose(y, want[:m], rtol=1e-5, atol=1e-6 * cols)
        if m < 17:
            alone.append(y[0])
            assert (y[0] == alone[0]).all() or blocks[0] == 5
        if m == 1:
            entry, grid = device.launched
            assert entry == ("linear_gemv" if blocks[0] == 5 else "linear_mma")
            assert grid == blocks
    assert not array(scratch.counters, np.uint32).any()
    assert device.calls["multiply"] == (arch != "sm_75") * (1 if cols % 32 == 0 else 3)


@pytest.mark.parametrize("tokens", [1, 9, 17])
def test_a_gate_in_its_product_changes_no_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two layers; more than 16 tokens are cuBLASLt's."""
    source = Quantised(lambda name, values: None)
    prompt = list(range(3, 3 + tokens))
    found = []
    for launches in ({"gated_mma": 2, "gated_act": 0}, {"gated_mma": 0, "gated_act": 2}):
        device = CountingDevice(emulator=EMULATOR)
        backend = CudaBackend(lambda device=device: device, tune_s=0)
        found.append(log_probabilities(backend, source, "bf16", prompt)[0])
        if tokens > 16:
            launches = {"gated_mma": 0, "gated_act": 2}
        assert {entry: device.entries[entry] for entry in launches} == launches
        monkeypatch.setattr(planning, "join_gates", _as_it_is)
    np.testing.assert_array_equal(*found)


def test_a_gate_in_its_product_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through captured graphs."""
    source = Quantised(lambda name, values: None)
    backend = CudaBackend(lambda: EmulatedDevice(emulator=EMULATOR))
    ids = generate(backend, source, "bf16")
    monkeypatch.setattr(planning, "join_gates", _as_it_is)
    assert generate(backend, source, "bf16") == ids


def _as_it_is(steps: OpList) -> OpList:
    return steps
