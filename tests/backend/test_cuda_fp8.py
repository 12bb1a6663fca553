"""FP8 checkpoints on the CUDA backend without a GPU: what their activations become, and which
kernel of which GPU takes their codes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.matrices import codes8
from vllmx_models.families.qwen import qwen3

from .cuda_models import (
    EIGHT_BITS,
    EMULATOR,
    MODEL,
    QWEN3,
    CountingDevice,
    Quantised,
    _can_emulate,
    _cpu,
    fp8_blocks,
    fp8_rows,
    log_probabilities,
)

__all__ = ["_can_emulate"]  # a fixture


def static_fp8(scales: Mapping[str, float]) -> Callable[[str, F32], WeightPart | None]:
    """FP8 with a fixed scale of the activations, by the name of a module."""

    def encoded(name: str, values: F32) -> WeightPart | None:
        if "embed" in name:
            return None
        part, module = fp8_rows(name, values), name.split(".")[-2]
        scale = np.array([scales.get(module, scales["any"])], np.float32).view(np.uint8)
        layout = replace(
            part.layout,
            options={
                **part.layout.options,
                "activations": "static",
                "activation_strategy": "tensor",
            },
        )
        raw = RawTensor(f"{name}.input_scale", "f32", (1,), scale)
        return replace(part, layout=layout, buffers={**part.buffers, "input_scale": raw})

    return encoded


@pytest.mark.parametrize(
    ("scales", "limit"),
    [
        ({"any": 1 / 64}, (0, 0.1)),
        ({"any": 1 / 64, "k_proj": 1 / 50}, (0, 0.1)),  # one matrix, rows of x by two scales
        ({"any": 0.0}, (0, 0.1)),  # not calibrated: each row has its own
        ({"any": 1e-4}, (0.3, 10)),  # nearly all of x is clipped to 0.0448
    ],
)
def test_static_scales_of_fp8(scales: Mapping[str, float], limit: tuple[float, float]) -> None:
    source, prompt = Quantised(static_fp8(scales)), [7, 11, 13] * 13
    device = CountingDevice(emulator=EMULATOR)
    got, _ = log_probabilities(CudaBackend(lambda: device), source, "bf16", prompt)
    want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
    assert limit[0] < abs(got - want).mean() < limit[1]
    layers, split = len(MODEL.shape.caches), "k_proj" in scales
    assert device.entries["f8e4m3"] == (6 if split else 4) * layers
    norms = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
    assert norms == (1 if split else 2) * layers
    # o_proj and down_proj; q, k and v each, where they differ
    assert device.entries["quantize_rows"] == (5 if split else 2) * layers


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize(("arch", "dtype"), [("sm_86", "bf16"), ("sm_75", "f16")])
def test_fp8_on_a_gpu_that_has_none(name: str, arch: str, dtype: str) -> None:
    """Tensor cores take the codes as numbers of 16 bits; activations are not rounded."""
    source = Quantised(EIGHT_BITS[name])
    for tokens in (1, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch=arch), ([7, 11, 13] * 13)[:tokens]
        got, _ = log_probabilities(CudaBackend(lambda d=device: d), source, dtype, prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        assert abs(got - want).mean() < 0.02
        # q, k and v are apart where their rows are not whole blocks
        products = 6 if name == "fp8 blocks" else 4
        assert device.entries["codes8_mma"] == products * len(MODEL.shape.caches)
        assert not device.entries["f8e4m3"]


@pytest.mark.parametrize(
    ("arch", "product"),
    [("sm_90a", "f8e4m3"), ("sm_89", "codes8_blocks"), ("sm_120a", "codes8_blocks")],
)
def test_fp8_blocks_times_codes(
    arch: str, product: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """cuBLASLt multiplies on Hopper, whose rows are whole fours, our kernel on Ada and small
    Blackwell; norms write the codes. Few rows stay as they are."""
    sizes = {"hidden_size": 512, "intermediate_size": 528, "num_attention_heads": 8}
    model = qwen3({**QWEN3, **sizes})
    monkeypatch.setattr(codes8, "OWN_TOKENS", 32)
    source = Quantised(fp8_blocks, model)
    for tokens in (32, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch=arch), ([7, 11, 13] * 13)[:tokens]
        with caplog.at_level(logging.INFO, "vllmx"):
            backend = CudaBackend(lambda d=device: d)
            got, _ = log_probabilities(backend, source, "bf16", prompt, model)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt, model)
        assert abs(got - want).mean() < (0.1 if tokens > 32 else 0.02)
        few = tokens <= 32
        layers = len(MODEL.shape.caches)  # of q, k, v, o, gate, up, down: not all are whole blocks
        assert device.entries["codes8_mma" if few else product] == 7 * layers
        assert not device.entries[product if few else "codes8_mma"]
        assert not device.entries["codes8_dequantize"]
        norms = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
        assert norms == (0 if few else 2 * layers)
        assert device.entries["quantize_rows"] == (0 if few else 2 * layers)


def test_fp8_in_bf16_without_tensor_cores() -> None:
    device = CountingDevice(emulator=EMULATOR, arch="sm_75")
    source = Quantised(EIGHT_BITS["fp8 blocks"])
    log_probabilities(CudaBackend(lambda: device), source, "bf16", [7, 11, 13])
    assert device.entries["codes8_gemv"] == 6 * len(MODEL.shape.caches)


def test_a_code_that_is_nan_is_not_hidden() -> None:
    """The code would be 480 as a number of 16 bits."""

    def with_nan(name: str, values: F32) -> WeightPart | None:
        part = fp8_blocks(name, values)
        if part is not None and "layers.1.mlp.down_proj" in name:
            part.buffers["weight"].data[300] = 0xFF
        return part

    for tokens in (1, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch="sm_86"), [7] * tokens
        backend = CudaBackend(lambda d=device: d)
        got, _ = log_probabilities(backend, Quantised(with_nan), "bf16", prompt)
        assert not np.isfinite(got).any()  # the sampler refuses such rows
