"""Experts that the CUDA backend multiplies as they are stored, on the emulator and beside numpy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.route import RouteSpec
from vllmx_core.ops.values import Value
from vllmx_core.plan import F32
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.program import expert_ops
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.encoders import encode
from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import Fp8, e4m3_codes
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.harness import VOCAB, Harness
from vllmx_testing.op_case import Case, Weights
from vllmx_testing.op_checks import STEPS
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

from .cuda_models import _can_emulate, fp8_blocks, fp8_rows, int8_rows
from .test_cuda_emulated import LaunchingDevice
from .test_cuda_w4 import FORMS as INTEGER_FORMS
from .test_cuda_w4 import Tensors

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


def integers(make: Any, scheme: Any, config: Mapping[str, Any]) -> Encode:
    """Experts of integers, as `make` writes them."""

    def encoded(name: str, values: F32) -> WeightPart:
        tensors = {f"{name}.{suffix}": array for suffix, array in make(values)[0].items()}
        part: WeightPart = scheme(Tensors(tensors), config).part(f"{name}.weight")
        return part

    return encoded


def one_scale(name: str, values: F32) -> WeightPart:
    """FP8 with a scale for each tensor, and one for its activations."""
    step = abs(values).max() / 448
    codes = e4m3_codes(values / step)
    layout = Fp8(
        8,
        None,
        {
            "strategy": "tensor",
            "dtype": "f8e4m3",
            "activations": "static",
            "activation_strategy": "tensor",
        },
    )
    raw = {
        key: RawTensor(f"{name}.{key}", "f32", (1,), np.array([size], np.float32).view(np.uint8))
        for key, size in (("scale", step), ("input_scale", len(name) / 100))
    }
    weight = RawTensor(name, "f8e4m3", values.shape, codes.reshape(-1))
    return StoredPart(name, values.shape, layout, {"weight": weight, **raw})


def blocks_of(name: str, values: F32) -> WeightPart:
    found = fp8_blocks(name, values)
    assert found is not None
    return found


W4_FORMS = {name: integers(*form) for name, form in INTEGER_FORMS.items() if "desc_act" not in name}
FORMS: dict[str, tuple[Encode, int, int, set[str]]] = {
    **{
        name: (form, 128, 128 if name == "awq" else 64, {"experts_w4"})
        for name, form in W4_FORMS.items()
    },
    "int8 rows": (int8_rows, 64, 32, {"experts_w4"}),
    "FP8 rows": (fp8_rows, 64, 32, {"experts_codes8"}),
    "FP8, one scale each": (one_scale, 64, 32, {"experts_codes8"}),
    "FP8 blocks": (blocks_of, 256, 128, {"experts_codes8"}),
    "Q4_K and Q6_K": (blocks("Q4_K", "Q6_K"), 256, 256, {"experts_gguf"}),
    "Q8_0": (blocks("Q8_0", "Q8_0"), 64, 32, {"experts_gguf"}),
    "MXFP4 of gpt-oss": (fp4, 64, 32, {"experts_gguf"}),
}
KERNELS = {"experts_gguf", "experts_mma", "experts_gemv", "experts_w4", "experts_codes8"}


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
        """The tensor cores of this GPU do not take bf16."""
        monkeypatch.setattr(self, "arch", "sm_75", raising=False)
        encoded, width, inner, kernels = FORMS["Q8_0"]
        model, builder = model_of(width, inner)
        self.compare(model, Stored(builder, encoded), STEPS[1:2], tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == kernels

    def test_one_stack_of_other_blocks(self) -> None:
        """The matrices up are as stored and those down dense: tiles are what both have."""

        def encoded(name: str, values: F32) -> WeightPart:
            kind = "Q8_0" if name.startswith("gate_up") or ".1." in name else "Q5_1"
            return blocks(kind, kind)(name, values)

        model, builder = model_of(64, 32)
        self.compare(model, Stored(builder, encoded), STEPS[:1], tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == {"experts_gguf", "experts_mma"}

    def test_one_stack_of_codes(self, caplog: pytest.LogCaptureFixture) -> None:
        """Down dense, for its experts differ: tiles that both have."""

        def encoded(name: str, values: F32) -> WeightPart:
            integer = name.startswith("gate_up") or ".1." in name
            return (W4_FORMS["gptq"] if integer else fp8_rows)(name, values)

        model, builder = model_of(128, 64)
        with caplog.at_level(logging.INFO, "vllmx"):
            self.compare(model, Stored(builder, encoded), STEPS[:1], tolerance=0.1, dtype="bf16")
        assert self.device.launched & KERNELS == {"experts_w4", "experts_mma"}
        assert "dequantised" in caplog.text

    @pytest.mark.parametrize("name", ["desc_act", "sm_75", "few rows"])
    def test_dequantised(
        self, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Columns in an order of each expert, no tensor cores, sizes that no tile divides."""
        monkeypatch.setattr(self, "arch", "sm_75" if name == "sm_75" else self.arch, raising=False)
        encoded = integers(*INTEGER_FORMS["gptq desc_act"]) if name == "desc_act" else fp8_rows
        model, builder = model_of(128, 48 if name == "few rows" else 128)
        with caplog.at_level(logging.INFO, "vllmx"):
            self.compare(model, Stored(builder, encoded), STEPS[:1], tolerance=0.1, dtype="bf16")
        used = "experts_mma" if name == "desc_act" else "experts_gemv"
        assert self.device.launched & KERNELS == {used}
        assert "dequantised" in caplog.text

    def test_float32_is_exact(self) -> None:
        """Nothing rounds activations in float32, which is for checks."""
        model, builder = model_of(64, 32)
        self.compare(model, Stored(builder, blocks("Q8_0", "Q4_0")), STEPS[:1])
