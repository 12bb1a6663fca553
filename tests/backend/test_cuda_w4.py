"""GPTQ, AWQ and packed integers on the CUDA backend without a GPU: 4 bits stay 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart
from vllmx_cuda import matrices
from vllmx_cuda.backend import CudaBackend
from vllmx_models.quantization.awq import awq
from vllmx_models.quantization.compressed_tensors import compressed_tensors
from vllmx_models.quantization.gptq import gptq

from ..integration import quantizers  # noqa: TID252 - no package to name
from .act_order_parts import Tensors
from .cuda_models import (
    EMULATOR,
    MATRICES,
    MODEL,
    CountingDevice,
    Quantised,
    _can_emulate,
    _cpu,
    check_near,
    emulated,
    generate,
    log_probabilities,
)

__all__ = ["_can_emulate"]  # a fixture


def quantised(
    make: Any, scheme: Any, config: Mapping[str, Any], *, model: Model = MODEL, **changed: Any
) -> Quantised:
    """Every projection as `make` writes it; `changed` replaces tensors."""

    def encode(name: str, values: F32) -> WeightPart | None:
        if "_proj" not in name:
            return None
        tensors = {**make(values)[0], **changed}
        stem = name.removesuffix(".weight")
        arrays = {f"{stem}.{suffix}": array for suffix, array in tensors.items()}
        part: WeightPart = scheme(Tensors(arrays), config).part(name)
        return part

    return Quantised(encode, model)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
W4A16 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}
FORMS = {
    "gptq": (
        partial(quantizers.gptq, bits=4, group_size=64, shuffled=False, v2=False),
        gptq,
        GPTQ,
    ),
    "gptq desc_act": (
        partial(quantizers.gptq, bits=4, group_size=64, shuffled=True, v2=False),
        gptq,
        {**GPTQ, "desc_act": True},
    ),
    "gptq 8 bit": (
        partial(quantizers.gptq, bits=8, group_size=128, shuffled=False, v2=True),
        gptq,
        {**GPTQ, "bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (partial(quantizers.awq, group_size=128), awq, AWQ),
    "compressed-tensors": (
        partial(quantizers.pack_quantized, bits=4, group_size=32),
        compressed_tensors,
        quantizers.ct_config(W4A16),
    ),
}


def bits_held(source: Quantised, loaded_bytes: int) -> float:
    """The bits a weight of the projections; all others lie there as 16 bits, vectors as 32."""
    held, values = loaded_bytes - source.stored_bytes(2), 0
    for name in MATRICES:
        if name in source.parts:
            values += int(np.prod(source.part(name).shape))
            held += sum(raw.data.nbytes for raw in source.part(name).buffers.values())
    return 8 * held / values


@pytest.mark.parametrize("name", FORMS)
def test_weights_stay_as_small_as_they_are(name: str) -> None:
    source, device = quantised(*FORMS[name]), CountingDevice(emulator=EMULATOR)
    _, info = log_probabilities(CudaBackend(lambda: device), source, "bf16", [1, 2])
    assert device.entries["w4_repack_words"] == len(source.parts)  # stored bytes travelled
    # scales, zeros, counters, and of desc_act the order of few rows
    assert bits_held(source, info.weight_bytes) < (9 if "8 bit" in name else 5)


@pytest.mark.parametrize("name", FORMS)
def test_bf16_is_near_what_the_integers_mean(name: str) -> None:
    """Tensor cores for one row and for many."""
    check_near(quantised(*FORMS[name]), 0.03)


@pytest.mark.parametrize("name", ["gptq", "gptq desc_act", "awq"])
def test_greedy_ids_are_the_cpus(name: str) -> None:
    """The products in float32 read rows that are dequantised."""
    source = quantised(*FORMS[name])
    got = generate(emulated(), source, "f32", chunk=16, overlap=True)
    assert got == generate(_cpu(), source.twin(), "f32")


def test_blocks_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices.split, "OWN_TOKENS", 64)
    monkeypatch.setattr(matrices.split, "splits", lambda n, k, _: 2 if k == 256 else 1)
    check_near(quantised(*FORMS["awq"]), 0.03)


def test_the_checking_build_finds_nothing() -> None:
    source = quantised(*FORMS["gptq desc_act"])
    ids = generate(emulated(check=True, emulator=None), source, "bf16", chunk=40)
    assert [len(row) for row in ids] == [8, 8, 8]


def test_a_zero_that_no_integer_can_have_is_refused() -> None:
    config = quantizers.ct_config(W4A16)
    zeros = np.full((32, 8), 120, np.int8)
    make = partial(quantizers.pack_quantized, bits=4, group_size=32)
    source = quantised(make, compressed_tensors, config)
    name = next(name for name in source.parts if "k_proj" in name)
    stem = name.removesuffix(".weight")
    tensors = {**make(source.twin().part(name).dequantize())[0], "weight_zero_point": zeros}
    arrays = {f"{stem}.{suffix}": array for suffix, array in tensors.items()}
    source.parts[name] = compressed_tensors(Tensors(arrays), config).part(name)
    with pytest.raises(WeightFormatError, match=r"k_proj.*zero point of 128.*within 0 and 127"):
        log_probabilities(emulated(), source, "bf16", [1])
