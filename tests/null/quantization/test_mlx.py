"""MLX's own checkpoints against the plain statement and against MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_models.quantization.detect import find_quantization

from .checkpoints import BF16, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]
RNG = np.random.default_rng(8)
CONFIG = {"group_size": 64, "bits": 4}


def words(rows: int, cols: int, bits: int) -> NDArray[np.uint32]:
    return RNG.integers(0, 1 << 32, (rows, cols * bits // 32), np.uint64).astype(np.uint32)


def affine(rows: int, cols: int, bits: int, group_size: int, dtype: Any = np.float16) -> Tensors:
    shape = (rows, cols // group_size)
    return {
        "m.weight": words(rows, cols, bits),
        "m.scales": RNG.standard_normal(shape).astype(dtype),
        "m.biases": RNG.standard_normal(shape).astype(dtype),
    }


def stated(tensors: Tensors, bits: int, group_size: int) -> NDArray[np.float32]:
    """One code after the other, from the row as one long integer."""
    packed, rows = tensors["m.weight"], []
    for row, scales, biases in zip(packed, tensors["m.scales"], tensors["m.biases"], strict=True):
        number = int.from_bytes(row.astype("<u4").tobytes(), "little")
        count = len(row) * 32 // bits
        codes = [number >> (bits * i) & ((1 << bits) - 1) for i in range(count)]
        rows.append(
            [
                np.float32(code) * np.float32(scales[i // group_size])
                + np.float32(biases[i // group_size])
                for i, code in enumerate(codes)
            ]
        )
    return np.array(rows, np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("group_size", "dtype"), [(32, np.float16), (64, BF16), (128, np.float32)])
def test_affine(tmp_path: Path, bits: int, group_size: int, dtype: Any) -> None:
    tensors = affine(5, 256, bits, group_size, dtype)
    part = open_part(tmp_path, tensors, {"group_size": group_size, "bits": bits})
    assert (part.shape, part.layout.kind) == ((5, 256), "mlx")
    assert_same_bits(part.dequantize(), stated(tensors, bits, group_size))


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 64), ("affine", 5, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
)
def test_against_mlx(tmp_path: Path, mode: str, bits: int, group_size: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is the judge")
    weight = RNG.standard_normal((6, 192 * 2)).astype(np.float32)
    stored = mx.quantize(mx.array(weight), group_size=group_size, bits=bits, mode=mode)
    names = ("m.weight", "m.scales", "m.biases")[: len(stored)]
    tensors = {name: np.array(array) for name, array in zip(names, stored, strict=True)}
    config = {"group_size": group_size, "bits": bits, "mode": mode}
    part = open_part(tmp_path, tensors, config)
    theirs = mx.dequantize(*stored, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    np.testing.assert_allclose(part.dequantize(), np.array(theirs), rtol=0, atol=1e-6)


def test_a_module_may_differ_and_others_are_plain(tmp_path: Path) -> None:
    four, eight = affine(4, 128, 4, 64), affine(4, 128, 8, 32)
    tensors = {
        **{f"a.{name}": array for name, array in four.items()},
        **{f"b.{name}": array for name, array in eight.items()},
        "norm.weight": np.ones(128, np.float32),
    }
    config = {**CONFIG, "b.m": {"group_size": 32, "bits": 8}, "c.m": False}
    source = open_source(tmp_path, tensors, config)
    assert set(source.names()) == {"a.m.weight", "b.m.weight", "norm.weight"}
    assert_same_bits(source.part("a.m.weight").dequantize(), stated(four, 4, 64))
    assert_same_bits(source.part("b.m.weight").dequantize(), stated(eight, 8, 32))
    assert source.part("norm.weight").layout.kind == "dense"


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_it_is_found_under_either_name(tmp_path: Path, key: str) -> None:
    assert find_quantization(tmp_path, {key: CONFIG}) == {**CONFIG, "quant_method": "mlx"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "bits = 7 is not read here; known: 2, 3, 4, 5, 6, 8"),
        ({"group_size": 48}, "group_size = 48"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size = 64 is not read here; known: 32"),
        ({"mode": "int4"}, "mode = int4"),
    ],
)
def test_unknown_options_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, affine(4, 128, 4, 64), CONFIG | change)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("m.weight", words(4, 96, 4)),  # a row and a half of groups
        ("m.weight", np.zeros((4, 0), np.uint32)),
        ("m.weight", np.zeros((4, 16), np.int32)),
        ("m.scales", np.ones((4, 3), np.float16)),
        ("m.scales", np.ones((4, 2), np.uint8)),
        ("m.biases", np.ones((3, 2), np.float16)),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, array: NDArray[Any]) -> None:
    with pytest.raises(WeightFormatError, match=name):
        open_part(tmp_path, affine(4, 128, 4, 64) | {name: array}, CONFIG)


def test_a_missing_companion_is_named(tmp_path: Path) -> None:
    tensors = affine(4, 128, 4, 64)
    del tensors["m.biases"]
    with pytest.raises(WeightFormatError, match=r"m\.biases' is missing"):
        open_part(tmp_path, tensors, CONFIG)
