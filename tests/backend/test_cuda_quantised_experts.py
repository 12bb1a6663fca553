"""Experts that the CUDA backend multiplies as they are stored, on the emulator and beside numpy."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from vllmx_core.backend import Backend
from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.route import RouteSpec
from vllmx_core.ops.values import Value
from vllmx_core.plan import F32
from vllmx_core.testing.harness import VOCAB, Harness
from vllmx_core.testing.op_checks import STEPS
from vllmx_core.testing.synthetic import ArraySource, Builder, SyntheticModel
from vllmx_core.weights import RawTensor, WeightPart
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.program import expert_ops
from vllmx_cuda.testing.emulator import Emulator
from vllmx_models.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.gguf.quantize.encode import encode
from vllmx_models.quantization.matrices import fp4_part

from .cuda_models import _can_emulate
from .test_cuda_emulated import LaunchingDevice

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()
Encode = Callable[[str, F32], WeightPart]


class Stored(ArraySource):
    """Matrices of experts as `encode` writes them."""

    def __init__(self, builder: Builder, encode: Encode) -> None:
        super().__init__(builder.arrays, "bf16")
        for name, values in builder.arrays.items():
            if name.startswith(("gate_up", "down")) and values.ndim == 2:
                self._parts[name] = encode(name, values)


def blocks(up: str, down: str) -> Encode:
    def encoded(name: str, values: F32) -> WeightPart:
        kind = TYPES_BY_NAME[down if name.startswith("down") else up]
        return weight_part(name, kind, values.shape, encode(kind.name, values))

    return encoded


def fp4(name: str, values: F32) -> WeightPart:
    """Any codes, as gpt-oss has them."""
    random, (rows, cols) = np.random.default_rng(len(name)), values.shape
    codes = random.integers(0, 256, (rows, cols // 2)).astype(np.uint8)
    scales = random.integers(118, 121, (rows, cols // 32)).astype(np.uint8)
    weight = RawTensor(name, "u8", codes.shape, codes.reshape(-1))
    return fp4_part(
        name, weight, RawTensor(name, "u8", scales.shape, scales.reshape(-1)), values.shape
    )


def model_of(width: int, inner: int) -> tuple[SyntheticModel, Builder]:
    def build(builder: Builder) -> None:
        builder.linear("router", 3, width)
        builder.stack("gate_up", 3, (inner, inner), width, (0, 1))
        builder.stack("down", 3, (width,), inner, (0,))

    def middle(ops: Ops, w: Weights, x: Value) -> Value:
        ids, weights = ops.route(ops.linear(x, w["router"]), RouteSpec(3))  # no tie to round
        return ops.experts(x, ids, weights, w["gate_up"], w["down"], ExpertsSpec())

    builder, case = Builder(VOCAB), Case.between("experts", width, middle, build)
    case.build(builder)
    return builder.build(1, case.body), builder


FORMS: dict[str, tuple[Encode, int, int, set[str]]] = {
    "Q4_K and Q6_K": (blocks("Q4_K", "Q6_K"), 256, 256, {"experts_gguf"}),
    "Q8_0": (blocks("Q8_0", "Q8_0"), 64, 32, {"experts_gguf"}),
    "MXFP4 of gpt-oss": (fp4, 64, 32, {"experts_gguf"}),
}
KERNELS = {"experts_gguf", "experts_mma", "experts_gemv"}


class TestQuantisedExperts(Harness):
    """Chunks, tiles that are full and not, beside the values that the codes mean."""

    arch = "sm_90a"

    def make_backend(self) -> Backend:
        self.device = LaunchingDevice(emulator=EMULATOR, arch=self.arch)
        return CudaBackend(lambda: self.device, capture_s=0)

    @pytest.mark.parametrize("name", FORMS)
    def test_as_stored(
        self, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(expert_ops, "CHUNK_TOKENS", 24)
        encoded, width, inner, kernels = FORMS[name]
        model, builder = model_of(width, inner)
        with caplog.at_level(logging.INFO, "vllmx"):
            self.compare(model, Stored(builder, encoded), STEPS, tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == kernels
        assert "dequantised" not in caplog.text

    def test_tiles_of_ordinary_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where bf16 has no tensor cores."""
        monkeypatch.setattr(self, "arch", "sm_75", raising=False)
        encoded, width, inner, kernels = FORMS["Q8_0"]
        model, builder = model_of(width, inner)
        self.compare(model, Stored(builder, encoded), STEPS[1:2], tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == kernels

    def test_one_stack_of_other_blocks(self) -> None:
        """Up as stored, down dense: in tiles that both have."""

        def encoded(name: str, values: F32) -> WeightPart:
            kind = "Q8_0" if name.startswith("gate_up") or ".1." in name else "Q5_1"
            return blocks(kind, kind)(name, values)

        model, builder = model_of(64, 32)
        self.compare(model, Stored(builder, encoded), STEPS[:1], tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == {"experts_gguf", "experts_mma"}

    def test_float32_is_exact(self) -> None:
        """For checks: nothing rounds activations."""
        model, builder = model_of(64, 32)
        self.compare(model, Stored(builder, blocks("Q8_0", "Q4_0")), STEPS[:1])
