"""Floats of 8 and 4 bits on MLX: the values of the file, or dequantised where no mode has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import Fp8
from vllmx_models.quantization.mlx import Mlx

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.matrices import QuantisedMatrix, stacked  # noqa: E402
from vllmx_metal.quantised import native_form, quantised_matrix  # noqa: E402

ROWS, COLS = 40, 192
RNG = np.random.default_rng(5)


def raw(dtype: Any, array: NDArray[Any]) -> RawTensor:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return RawTensor("w", dtype, array.shape, data)


def e4m3(*shape: int) -> NDArray[np.uint8]:
    """Every code but NaN."""
    codes = RNG.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, codes & 0x80, codes).astype(np.uint8)


def fp8(
    strategy: str, scale: NDArray[Any], dtype: Any = "f32", codes: str = "f8e4m3"
) -> WeightPart:
    options = {"strategy": strategy, "dtype": codes, "block_rows": 32, "block_cols": 64}
    buffers = {"weight": raw(codes, e4m3(ROWS, COLS)), "scale": raw(dtype, scale)}
    return StoredPart("w", (ROWS, COLS), Fp8(8, None, options), buffers)


def fp4(group: int, scale: RawTensor, combine: str = "none") -> WeightPart:
    packed = RNG.integers(0, 256, (ROWS, COLS // 2), np.uint8)
    whole = None
    if combine != "none":
        whole = raw("f32", np.array(np.float32(0.0017 if combine == "multiply" else 590.0)))
    part = fp4_part(
        "w", raw("u8", packed), scale, (ROWS, COLS), global_scale=whole, combine=combine
    )
    assert part.layout.group_size == group
    return part


def exponents(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(110, 135, shape, np.uint8)


def scales(*shape: int) -> NDArray[np.float32]:
    return RNG.uniform(1e-4, 3e-2, shape).astype(np.float32)


def positive_e4m3(*shape: int) -> RawTensor:
    return raw("f8e4m3", RNG.integers(8, 120, shape, np.uint8))


PARTS = {
    "fp8, one scale": (lambda: fp8("tensor", scales(1)), "mxfp8"),
    "fp8, a scale of no dimensions": (lambda: fp8("tensor", scales()), "mxfp8"),
    "fp8, a scale a row": (lambda: fp8("channel", scales(ROWS, 1)), "mxfp8"),
    "fp8, a scale of zero": (lambda: fp8("channel", np.zeros((ROWS, 1), np.float32)), "mxfp8"),
    "fp8, blocks of powers of two": (lambda: fp8("block", exponents(2, 3), "f8e8m0"), "mxfp8"),
    "mxfp4": (lambda: fp4(32, raw("u8", exponents(ROWS, COLS // 32))), "mxfp4"),
    "nvfp4, multiplied": (lambda: fp4(16, positive_e4m3(ROWS, COLS // 16), "multiply"), "nvfp4"),
    "nvfp4, divided": (lambda: fp4(16, positive_e4m3(ROWS, COLS // 16), "divide"), "nvfp4"),
}


def matrix_of(part: WeightPart, dtype: Any = mx.float32) -> QuantisedMatrix:
    form = native_form(part)
    assert form is not None
    matrix = quantised_matrix(part, form, dtype)
    assert matrix is not None
    held = sum(array.nbytes for array in matrix.arrays)
    assert held <= form.num_bytes(*part.shape) < 2 * ROWS * COLS
    return matrix


def values(matrix: QuantisedMatrix) -> NDArray[np.float32]:
    return np.array(matrix.rows(mx.arange(matrix.codes.shape[0])))


@pytest.mark.parametrize(("make", "mode"), PARTS.values(), ids=PARTS.keys())
def test_the_values_of_the_file(make: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_metal.float_codes.MOST_VALUES", 7 * COLS)
    part = make()
    expected = part.dequantize()
    matrix = matrix_of(part)
    assert matrix.mode == mode
    # up to the order of two multiplications by scales
    np.testing.assert_allclose(values(matrix), expected, rtol=2e-7, atol=0)
    x = RNG.standard_normal((3, COLS)).astype(np.float32)
    product = x.astype(np.float64) @ expected.T.astype(np.float64)
    found = np.array(matrix.multiply(mx.array(x)))
    np.testing.assert_allclose(found, product, rtol=0, atol=1e-5 * np.abs(product).max())


def test_float16_does_not_overflow() -> None:
    """Codes times group scales are in the thousands before the scale of the whole comes."""
    part = fp4(16, raw("f8e4m3", np.full((ROWS, COLS // 16), 126, np.uint8)), "multiply")
    x = np.full((1, COLS), 30, np.float32)
    found = np.array(matrix_of(part, mx.float16).multiply(mx.array(x)).astype(mx.float32))
    expected = x @ part.dequantize().T
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


def test_fused_parts_become_one_matrix() -> None:
    parts = [fp8("tensor", scales(1)), fp8("channel", scales(ROWS, 1))]
    joined = stacked([matrix_of(part) for part in parts])
    assert isinstance(joined, QuantisedMatrix)
    expected = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_allclose(values(joined), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    "part",
    [
        fp8("block", scales(2, 3)),
        fp8("tensor", scales(1), codes="f8e5m2"),
        fp4(16, raw("u8", exponents(ROWS, COLS // 16))),
        fp4(64, raw("u8", exponents(ROWS, COLS // 64))),
    ],
    ids=["fp8 blocks of any scale", "e5m2", "exponents of 16", "exponents of 64"],
)
def test_what_no_mode_has_is_dequantised(part: WeightPart) -> None:
    assert native_form(part) is None


def test_mxfp4_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    blocks = RNG.integers(0, 256, (ROWS * COLS // 32, 17), np.uint8)
    blocks[:, 0] = RNG.integers(100, 140, len(blocks), np.uint8)
    part = weight_part("w", TYPES_BY_NAME["MXFP4"], (ROWS, COLS), blocks.reshape(-1))
    expected = gguf.dequantize(blocks.reshape(ROWS, -1), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(values(matrix_of(part)), expected)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_mlx_checkpoints_stay_as_they_are(mode: str) -> None:
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    weight = mx.array(RNG.standard_normal((ROWS, COLS)).astype(np.float32))
    codes, made = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
    part = StoredPart(
        "w",
        (ROWS, COLS),
        Mlx(bits, group, {"mode": mode}),
        {"weight": raw("u32", np.array(codes)), "scales": raw("u8", np.array(made))},
    )
    matrix = matrix_of(part)
    expected = mx.dequantize(codes, made, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(values(matrix), np.array(expected))
