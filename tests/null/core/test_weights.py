"""Conversions of raw tensors, and from a weight map to arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import DENSE, Layout, StoredPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import (
    ITEM_BYTES,
    DType,
    RawTensor,
    bf16_to_f32,
    f32_to_bf16,
    float8_to_f32,
)
from vllmx_testing.parts import MadePart
from vllmx_testing.synthetic import ArraySource


def test_bf16_of_every_word() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    wide = bf16_to_f32(words)
    np.testing.assert_array_equal(wide, words.view(ml_dtypes.bfloat16).astype(np.float32))
    back = f32_to_bf16(wide)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(back[finite], words[finite])
    assert np.isnan(bf16_to_f32(back[~finite])).all()


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001]  # two ties, max, least subnormal
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(f32_to_bf16(values), expected)


@pytest.mark.parametrize(
    ("dtype", "oracle"),
    [
        ("f8e4m3", ml_dtypes.float8_e4m3fn),
        ("f8e5m2", ml_dtypes.float8_e5m2),
        ("f8e8m0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_float8_of_every_code(dtype: DType, oracle: Any) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    expected = codes.view(oracle).astype(np.float32)
    values = float8_to_f32(codes, dtype)
    np.testing.assert_array_equal(values, expected)
    number = ~np.isnan(expected)  # zeros keep their sign
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))
    raw = RawTensor("t", dtype, codes.shape, codes.reshape(-1))
    np.testing.assert_array_equal(raw.view(), codes)
    np.testing.assert_array_equal(raw.to_f32(), expected)


VALUES: dict[DType, Any] = {
    "f32": np.array([[1.5, -2.25]], "<f4"),
    "f16": np.array([[1.5, -2.25]], "<f2"),
    "bf16": np.array([[1.5, -2.25]], ml_dtypes.bfloat16).view(np.uint16),
    "f64": np.array([[1.5, -2.25]], "<f8"),
    "i64": np.array([[3, -4]], "<i8"),
    "i32": np.array([[3, -4]], "<i4"),
    "i16": np.array([[3, -4]], "<i2"),
    "i8": np.array([[3, -4]], "i1"),
    "u8": np.array([[3, 4]], "u1"),
    "bool": np.array([[True, False]]),
}


@pytest.mark.parametrize("dtype", VALUES)
def test_raw_tensors_are_viewed_and_widened(dtype: DType) -> None:
    array = VALUES[dtype]
    raw = RawTensor("t", dtype, (1, 2), array.reshape(-1).view(np.uint8))
    assert raw.data.nbytes == 2 * ITEM_BYTES[dtype]
    assert np.shares_memory(raw.view(), array)
    np.testing.assert_array_equal(raw.view(), array)
    expected = [[1.5, -2.25]] if dtype == "bf16" else array.astype(np.float32)
    wide = raw.to_f32()
    np.testing.assert_array_equal(wide, expected)
    assert wide.dtype == np.float32


def test_made_parts_are_made_by_rows() -> None:
    values = np.random.default_rng(2).standard_normal((7, 4)).astype(np.float32)
    asked: list[tuple[int, int]] = []

    def make(begin: int, end: int) -> StoredPart:
        asked.append((begin, end))
        return ArraySource({"w": values[begin:end] * 2}).part("w").stored()

    part = MadePart("w", (7, 4), DENSE, make)
    np.testing.assert_array_equal(part.dequantize(2, 5), values[2:5] * 2)
    np.testing.assert_array_equal(part.rows(1, 2).dequantize(), values[1:2] * 2)
    assert asked == [(2, 5), (1, 2)]
    np.testing.assert_array_equal(part.stored().buffers["weight"].to_f32(), values * 2)
    assert asked[2:] == [(0, 7)]


def test_rows_cut_what_has_an_entry_for_each() -> None:
    arrays = {
        "weight": RawTensor("w", "i8", (6, 3), np.arange(18, dtype=np.uint8)),
        "scale": RawTensor("s", "f32", (6, 1), np.arange(6, dtype="<f4").view(np.uint8)),
        "input_scale": RawTensor("i", "f32", (1,), np.ones(1, "<f4").view(np.uint8)),
    }
    piece = StoredPart("w", (6, 3), Layout(8), arrays).rows(2, 4)
    assert piece.shape == (2, 3)
    np.testing.assert_array_equal(piece.buffers["weight"].view(), [[6, 7, 8], [9, 10, 11]])
    np.testing.assert_array_equal(piece.buffers["scale"].view(), [[2], [3]])
    assert piece.buffers["input_scale"] is arrays["input_scale"]


def test_assemble_joins_parts_biases_and_offset() -> None:
    random = np.random.default_rng(0)
    arrays = {
        "q.w": random.standard_normal((3, 4)).astype(np.float32),
        "k.w": random.standard_normal((2, 4)).astype(np.float32),
        "k.b": random.standard_normal(2).astype(np.float32),
        "n.w": random.standard_normal(4).astype(np.float32),
    }
    source = ArraySource(arrays)
    parts = (PartSpec("q.w", 3), PartSpec("k.w", 2, bias="k.b"))
    weight, bias = assemble(WeightSpec("qk", "linear", parts, 4), source)
    np.testing.assert_array_equal(weight, np.concatenate([arrays["q.w"], arrays["k.w"]]))
    assert bias is not None
    np.testing.assert_array_equal(bias, [0, 0, 0, *arrays["k.b"]])
    norm, none = assemble(WeightSpec("n", "vector", (PartSpec("n.w", 4),), offset=1.0), source)
    np.testing.assert_array_equal(norm, arrays["n.w"] + 1)
    assert none is None


def test_axes_are_flattened_in_the_order_of_the_map() -> None:
    """A convolution, or its matrix, over rows of features side by side."""
    values = np.arange(48, dtype=np.float32).reshape(2, 6, 2, 2)
    wanted = values.transpose(0, 2, 3, 1).reshape(2, 24)
    for stored in (values, values.reshape(2, 24)):
        parts = (PartSpec("a", 2),)
        spec = WeightSpec("w", "linear", parts, 24, shape=(2, 6, 2, 2), axes=(0, 2, 3, 1))
        np.testing.assert_array_equal(assemble(spec, ArraySource({"a": stored}))[0], wanted)
    with pytest.raises(WeightFormatError, match="do not belong together"):
        assemble(spec, ArraySource({"a": values.reshape(2, 2, 6, 2)}))


def test_parts_of_a_table_may_be_vectors() -> None:
    parts = (PartSpec("one", 1), PartSpec("more", 3), PartSpec("last", 1))
    given = {
        "one": np.full((1, 1, 4), 7, np.float32),
        "more": np.arange(12, dtype=np.float32).reshape(1, 3, 4),
        "last": np.full(4, 8, np.float32),
    }
    spec = WeightSpec("w", "embedding", parts, 4, shape=(3, 4))
    found = assemble(spec, ArraySource(given))[0]
    np.testing.assert_array_equal(found, np.concatenate([a.reshape(-1, 4) for a in given.values()]))
    with pytest.raises(WeightFormatError, match="do not belong together"):
        assemble(spec, ArraySource({**given, "last": np.zeros(5, np.float32)}))


def test_assemble_refuses_missing_and_misshapen_tensors() -> None:
    source = ArraySource({"weight": np.zeros((3, 4), np.float32)})
    with pytest.raises(WeightFormatError, match=r"'wieght'; nearest: weight"):
        assemble(WeightSpec("w", "linear", (PartSpec("wieght", 3),), 4), source)
    with pytest.raises(WeightFormatError, match=r"'weight' has shape \[3, 4\].*\[3, 5\]"):
        assemble(WeightSpec("w", "linear", (PartSpec("weight", 3),), 5), source)
