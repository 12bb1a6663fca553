"""Quantised checkpoints on the CUDA backend without a GPU: they stay quantised in its memory, and
the model stays itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights.part import DENSE, WeightPart
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.device import Product
from vllmx_cuda.matrices import codes8, pieces
from vllmx_models.families.qwen import qwen3
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.encoders import encode

from .cuda_models import (
    EIGHT_BITS,
    EMULATOR,
    MODEL,
    QWEN3,
    CountingDevice,
    Encode,
    Quantised,
    _can_emulate,
    _cpu,
    check_held,
    check_near,
    emulated,
    generate,
    log_probabilities,
    made,
)

__all__ = ["_can_emulate"]  # a fixture


def gguf_as(kinds: Mapping[str, str], usual: str) -> Encode:
    """Blocks of the type of the first key that a name holds; Q8_0 where rows are too short."""

    def encoded(name: str, values: F32) -> WeightPart:
        kind = next((kinds[word] for word in kinds if word in name), usual)
        if values.shape[1] % TYPES_BY_NAME[kind].values:
            kind = "Q8_0"
        data = encode(kind, values)
        return weight_part(name, TYPES_BY_NAME[kind], values.shape, data)

    return encoded


Q4_K_M = gguf_as({"v_proj": "Q6_K", "down_proj": "Q6_K", "embed": "Q6_K"}, "Q4_K")
GGUF = {
    "Q4_K_M": Q4_K_M,
    "Q8_0": gguf_as({}, "Q8_0"),
    "Q4_0": gguf_as({"embed": "Q5_1"}, "Q4_0"),
    "Q2_K": gguf_as({"v_proj": "Q3_K", "embed": "Q5_K"}, "Q2_K"),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_stays_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Quantised(GGUF[name])
    # codes of 4 and 8 bits are repacked, with counters; those of Q4_K get factors as float16
    check_held(source, "bf16", caplog, more=0.12 if name == "Q4_K_M" else 0.02)
    check_near(source, 0.03)


def test_what_is_quantised_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--isq`: the same answers, uploaded in small pieces, as late as may be."""
    whole, pieces_of = Quantised(Q4_K_M), Quantised(made(Q4_K_M))
    want, info = log_probabilities(emulated(), whole, "bf16", [3, 1, 4])
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    got, again = log_probabilities(emulated(deferred=True), pieces_of, "bf16", [3, 1, 4])
    np.testing.assert_array_equal(got, want)
    assert again.weight_bytes == info.weight_bytes


def test_a_damaged_block_is_refused_by_the_name_of_its_tensor() -> None:
    source = Quantised(Q4_K_M)
    name = next(name for name in source.parts if "1.mlp.down_proj" in name)  # Q6_K
    blocks = np.array(source.parts[name].buffers["weight"].data)
    blocks[210 * 77 + 208 :][:2] = np.array([np.nan], np.float16).view(np.uint8)
    kind, shape = TYPES_BY_NAME["Q6_K"], source.parts[name].shape
    source.parts[name] = weight_part(name, kind, shape, blocks)
    with pytest.raises(WeightFormatError, match=rf"'{name}' has a scale .*nan.*65504 of float16"):
        log_probabilities(emulated(), source, "bf16", [1])


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits_stay_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Quantised(EIGHT_BITS[name])
    check_held(source, "bf16", caplog, more=0.01)  # with counters
    check_near(
        source, 0.1 if name.startswith("fp8") else 0.03
    )  # activations of three bits and a leading one


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8"])
def test_eight_bits_answer_as_on_the_cpu(name: str) -> None:
    """Activations are not rounded in float32, so that greedy ids are equal."""
    source = Quantised(EIGHT_BITS[name])
    assert generate(emulated(), source, "f32", chunk=16) == generate(_cpu(), source.twin(), "f32")


def test_norms_write_codes_for_the_products_behind_them() -> None:
    """Two of a layer's four products; none where rows are few and stay as they are."""
    for tokens, coded in ((16, 2 * len(MODEL.shape.caches)), (2, 0)):
        device = CountingDevice(emulator=EMULATOR)
        source = Quantised(EIGHT_BITS["int8"])
        log_probabilities(CudaBackend(lambda device=device: device), source, "bf16", [9] * tokens)
        fused = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
        assert (fused, device.entries["quantize_rows"]) == (coded, coded)
        assert device.entries["i8"] == 2 * coded
        assert device.entries["codes8_gemv"] == (0 if coded else 4 * len(MODEL.shape.caches))


class RefusingDevice(CountingDevice):
    """A GPU whose cuBLASLt has no products of codes, or none of so many rows."""

    refused_rows = range(1 << 30)

    def can_multiply(self, product: Product) -> bool:
        codes = product.dtype in ("i8", "f8e4m3")
        return not (codes and product.m in self.refused_rows) and super().can_multiply(product)

    def multiply(self, product: Product, *rest: Any) -> None:
        assert self.can_multiply(product), product
        super().multiply(product, *rest)


@pytest.mark.parametrize(("name", "few"), [("fp8", "codes8_mma"), ("int8", "codes8_gemv")])
def test_codes_that_cublaslt_refuses(name: str, few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations stay as they are then: few rows meet the codes, for many they are dequantised."""
    monkeypatch.setattr(codes8, "OWN_TOKENS", 32)
    source, layers = Quantised(EIGHT_BITS[name]), len(MODEL.shape.caches)
    for prompt, entry in (([9, 4] * 8, few), ([7, 11, 13] * 13, "codes8_dequantize")):
        device = RefusingDevice(emulator=EMULATOR)
        got, _ = log_probabilities(CudaBackend(lambda d=device: d), source, "bf16", prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        assert abs(got - want).mean() < 0.02
        assert device.entries[entry] == 4 * layers
        assert not [e for e in device.entries if e.endswith("_codes") or e == "quantize_rows"]


def test_codes_that_cublaslt_refuses_for_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RefusingDevice, "refused_rows", range(39, 40))
    for tokens, refused in ((38, False), (39, True)):
        device = RefusingDevice(emulator=EMULATOR)
        source = Quantised(EIGHT_BITS["int8"])
        log_probabilities(CudaBackend(lambda d=device: d), source, "bf16", [9] * tokens)
        assert bool(device.entries["codes8_dequantize"]) == refused
        assert bool(device.entries["i8"]) != refused


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_codes_of_gguf_meet_tensor_cores(name: str, arch: str) -> None:
    """Those of Turing too, which know f16 alone."""
    for tokens in (1, 39):
        device = CountingDevice(emulator=EMULATOR, arch=arch)
        source, prompt = Quantised(GGUF[name]), [7, 11, 13] * tokens
        backend = CudaBackend(lambda d=device: d)
        got, _ = log_probabilities(backend, source, "f16", prompt[:tokens])
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt[:tokens])
        assert abs(got - want).mean() < 0.01
        parts = 5 if name == "Q4_K_M" else 4  # of q, k and v the last in 6 bits
        assert device.entries["w4_linear"] == parts * len(MODEL.shape.caches)
        assert not device.entries["w4_dequantize"]


def test_a_tied_embedding_of_codes() -> None:
    """Rows are gathered, in whole tiles, from what the head multiplies."""
    model, device = qwen3({**QWEN3, "vocab_size": 64}), CountingDevice(emulator=EMULATOR)
    source, prompt = Quantised(Q4_K_M, model), [7, 63, 0] * 13
    got, info = log_probabilities(CudaBackend(lambda: device), source, "bf16", prompt, model)
    want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt, model)
    assert abs(got - want).mean() < 0.03
    assert device.entries["w4_gather"] == 1
    assert not [entry for entry in device.entries if "gguf" in entry or "gemv" in entry]
    assert info.weight_bytes < 1.12 * source.stored_bytes(2)


def test_gguf_answers_as_on_the_cpu() -> None:
    """Nothing is rounded in float32: greedy ids, chunked, decoded from captured graphs."""
    source = Quantised(Q4_K_M)
    assert all(part.layout != DENSE for part in source.parts.values())
    got = generate(emulated(), source, "f32", chunk=16, overlap=True)
    assert got == generate(_cpu(), source.twin(), "f32")


def test_the_checking_build_finds_nothing() -> None:
    ids = generate(emulated(check=True, emulator=None), Quantised(Q4_K_M), "bf16", chunk=40)
    assert [len(row) for row in ids] == [8, 8, 8]
