"""Quantised weights on MLX: the values of the file, or a stated distance from them; natively where
a layout is known, dequantised and said so where it is not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.backend import LoadOptions
from vllmx_core.weights.part import Layout, StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_testing.harness import PAGE, VOCAB, all_logprobs
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.backend import MetalBackend  # noqa: E402
from vllmx_metal.gguf_affine import KINDS  # noqa: E402
from vllmx_metal.matrices import DenseMatrix, QuantisedMatrix, StackedMatrix  # noqa: E402
from vllmx_metal.quantised import (  # noqa: E402
    native_form,
    pack,
    quantised_matrix,
)
from vllmx_metal.weights import WeightLoader  # noqa: E402

ROWS, COLS = 24, 512
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL")
RNG = np.random.default_rng(11)


def blocks(name: str, rows: int = ROWS, cols: int = COLS) -> NDArray[np.uint8]:
    """Random bytes whose float16 scales are of a usual size: every code and sub-scale occurs."""
    kind = TYPES_BY_NAME[name]
    data = RNG.integers(0, 256, (rows * cols // kind.values, kind.num_bytes), np.uint8)
    places = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
    }.get(name, (0,))
    for place in places:
        scale = (RNG.uniform(0.5, 2, len(data)) * 1e-2).astype("<f2")
        data[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return data.reshape(-1)


def gguf_part(name: str, rows: int = ROWS, cols: int = COLS) -> WeightPart:
    return weight_part("w", TYPES_BY_NAME[name], (rows, cols), blocks(name, rows, cols))


def matrix_of(part: WeightPart, dtype: Any = None) -> QuantisedMatrix:
    form = native_form(part)
    assert form is not None
    matrix = quantised_matrix(part, form, mx.float32 if dtype is None else dtype)
    assert matrix is not None
    return matrix


def values(matrix: QuantisedMatrix) -> NDArray[np.float32]:
    """The values of all rows, in their own order of input features."""
    return np.array(matrix.rows(mx.arange(matrix.codes.shape[0])))


class TestGGUF:
    @pytest.mark.parametrize("name", EXACT)
    def test_the_same_bits_as_ggml(self, name: str) -> None:
        gguf = pytest.importorskip("gguf")
        part = gguf_part(name)
        kind = getattr(gguf.GGMLQuantizationType, name)
        data = part.buffers["weight"].data.reshape(ROWS, -1)
        expected = gguf.dequantize(data, kind)
        matrix = matrix_of(part)
        assert matrix.scales.dtype == mx.float32
        np.testing.assert_array_equal(values(matrix), expected)

    def test_iq4_xs_is_rounded_once_more(self) -> None:
        part = gguf_part("IQ4_XS")
        np.testing.assert_allclose(values(matrix_of(part)), part.dequantize(), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("name", "share"), [("Q6_K", 0.004), ("Q3_K", 0.03), ("Q2_K", 0.05)])
    def test_how_far_the_others_are(self, name: str, share: float) -> None:
        """RMS of the difference over RMS of the weights; every bound within a third of what is
        measured."""
        part = gguf_part(name)
        expected = part.dequantize()
        found = rms(values(matrix_of(part)) - expected) / rms(expected)
        print(f"{name}: {found:.2e}")  # pytest -rP shows it
        assert share / 1.5 < found < share

    def test_the_half_with_the_larger_scale_is_exact(self) -> None:
        for name in ("Q6_K", "Q3_K"):
            part = gguf_part(name)
            expected = part.dequantize().reshape(ROWS, -1, 2, 16)
            change = np.abs(values(matrix_of(part)).reshape(expected.shape) - expected).max(-1)
            # a code at the edge of the grid may be clipped; no other value changes in that half
            assert (change.min(-1) < 2e-6).mean() > 0.9

    @pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q6_K"])
    def test_float16_keeps_scales_of_two_bytes(self, name: str) -> None:
        part = gguf_part(name)
        matrix = matrix_of(part, mx.float16)
        assert matrix.scales.dtype == mx.float16
        difference = np.abs(values(matrix) - values(matrix_of(part)))
        assert 0 <= difference.max() < 2e-3 * np.abs(part.dequantize()).max()

    def test_bfloat16_keeps_scales_of_four_bytes_where_two_would_change_them(self) -> None:
        assert matrix_of(gguf_part("Q4_K"), mx.bfloat16).scales.dtype == mx.float32
        data = blocks("Q8_0").reshape(-1, 34)
        data[:, :2] = np.full(len(data), 0.125, "<f2").view(np.uint8).reshape(-1, 2)
        part = weight_part("w", TYPES_BY_NAME["Q8_0"], (ROWS, COLS), data.reshape(-1))
        assert matrix_of(part, mx.bfloat16).scales.dtype == mx.bfloat16

    def test_rows_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        part = gguf_part("Q5_K")
        whole = values(matrix_of(part))
        monkeypatch.setattr("vllmx_metal.quantised.MOST_VALUES", 5 * COLS)
        np.testing.assert_array_equal(values(matrix_of(part)), whole)

    def test_every_type_that_ggml_blocks_have_is_known_or_dequantised(self) -> None:
        quantised = {name for name, kind in TYPES_BY_NAME.items() if kind.decoder is not None}
        assert quantised - set(KINDS) == {"MXFP4"}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_as_mlx_does(bits: int) -> None:
    codes = RNG.integers(0, 1 << bits, (7, 96), np.uint8)
    one, zero = mx.ones((7, 3)), mx.zeros((7, 3))
    words = mx.array(pack(codes, bits))
    found = mx.dequantize(words, one, zero, group_size=32, bits=bits)
    np.testing.assert_array_equal(np.array(found), codes)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q8_0"])
def test_products_are_those_of_the_values(name: str) -> None:
    part = gguf_part(name)
    x = RNG.standard_normal((5, COLS)).astype(np.float32)
    expected = x.astype(np.float64) @ part.dequantize().T.astype(np.float64)
    found = np.array(matrix_of(part).multiply(mx.array(x)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


class Mixed(ArraySource):
    """Some matrices of a source as GGUF blocks."""

    def __init__(self, source: ArraySource, kinds: Mapping[str, str]) -> None:
        super().__init__({name: source.part(name).dequantize() for name in source.names()})
        self._kinds = kinds
        self._made: dict[str, WeightPart] = {}

    def part(self, name: str) -> WeightPart:
        plain = super().part(name)
        kind = next((kind for end, kind in self._kinds.items() if name.endswith(end)), None)
        if kind is None or len(plain.shape) != 2 or plain.shape[1] % 32:
            return plain
        if name not in self._made:
            self._made[name] = gguf_part(kind, *plain.shape)
        return self._made[name]


def rms(x: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))


MIXTURE = {".qkv.2.weight": "Q8_0", ".weight": "Q4_0"}


class TestModels:
    def test_parts_of_different_types_are_multiplied_one_below_the_other(self) -> None:
        model, dense = decoder()
        source = Mixed(dense, MIXTURE)
        weights = WeightLoader(source, mx.float32).load(model.weights(), {}, progress=False)
        qkv = weights["0.qkv"].matrix
        assert isinstance(qkv, StackedMatrix)
        assert [part.bits for part in qkv.parts] == [4, 8]  # q and k became one
        assert isinstance(weights["0.gate_up"].matrix, QuantisedMatrix)
        assert isinstance(weights["0.down"].matrix, DenseMatrix)  # 40 columns are no whole groups
        assert weights["head"].matrix is weights["embed"]

    @pytest.mark.parametrize(("dtype", "distance"), [("f32", 1e-4), ("f16", 0.05), ("bf16", 0.3)])
    def test_logits_are_those_of_the_dequantised_model(self, dtype: str, distance: float) -> None:
        model, dense = decoder()
        source = Mixed(dense, MIXTURE)
        twin = ArraySource({name: source.part(name).dequantize() for name in source.names()})
        plan = make_plan([Row(list(range(18)), 0, [0, 1], "all")], PAGE)
        results, sizes = [], []
        for checkpoint, as_dtype in ((source, dtype), (twin, "f32")):
            options = LoadOptions(
                dtype=as_dtype, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64
            )
            loaded = MetalBackend().load(model, checkpoint, options)
            results.append(all_logprobs(loaded, plan, VOCAB))
            sizes.append(loaded.info.weight_bytes)
            loaded.close()
        np.testing.assert_allclose(results[0], results[1], rtol=0, atol=distance)
        assert sizes[0] < sizes[1]


class Strange(Layout):
    kind = "strange"

    def decode(self, part: StoredPart, begin: int, end: int) -> Any:
        return part.buffers["weight"].rows(begin, end).to_f32() / np.float32(64)


def test_a_layout_that_mlx_does_not_have_is_dequantised_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = RawTensor("w", "i8", (32, 32), RNG.integers(0, 256, 32 * 32, np.uint8))
    part = StoredPart(
        "w",
        (32, 32),
        Strange(8),
        {"weight": raw},
    )
    model, dense = decoder()

    class Source(ArraySource):
        def part(self, name: str) -> WeightPart:
            return part if name == "0.out.0.weight" else super().part(name)

    source = Source({name: dense.part(name).dequantize() for name in dense.names()})
    with caplog.at_level(logging.INFO, "vllmx.metal"):
        weights = WeightLoader(source, mx.float32).load(model.weights(), {}, progress=False)
    np.testing.assert_array_equal(np.array(weights["0.out"].matrix.weight), part.dequantize())
    assert "strange weights are dequantised at load and take 4096 bytes" in caplog.messages
