"""Products with dense matrices on the emulated device: which kernel, which blocks, which bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.matrices.dense import Dense
from vllmx_cuda.matrices.form import Operands, ProductScratch, Segment, Target
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulated_products import array
from vllmx_testing.cuda.emulator import Emulator

from .cuda_models import _can_emulate

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
