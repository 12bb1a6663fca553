"""AWQ against the plain statement of its formats, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError

from . import statement
from .checkpoints import BF16, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]


def words(random: np.random.Generator, *shape: int) -> NDArray[np.int32]:
    return random.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def gemm(rows: int, cols: int, group_size: int, scale_dtype: Any = np.float16) -> Tensors:
    random = np.random.default_rng(rows + cols)
    groups = -(-cols // group_size)
    return {
        "m.qweight": words(random, cols, rows // 8),
        "m.qzeros": words(random, groups, rows // 8),
        "m.scales": random.standard_normal((groups, rows)).astype(np.float32).astype(scale_dtype),
    }


def config(group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, **more}


@pytest.mark.parametrize("scale_dtype", [np.float16, BF16, np.float32])
@pytest.mark.parametrize(
    ("rows", "cols", "group_size"), [(16, 64, 32), (40, 72, 24), (8, 50, 16), (520, 16, 16)]
)
def test_gemm(tmp_path: Path, rows: int, cols: int, group_size: int, scale_dtype: Any) -> None:
    tensors = gemm(rows, cols, group_size, scale_dtype)
    part = open_part(tmp_path, tensors, config(group_size, version="gemm", zero_point=True))
    assert part.shape == (rows, cols)
    assert (part.layout.kind, part.layout.options) == ("awq", {"packing": "gemm"})
    expected = statement.awq_gemm(*tensors.values(), group_size=group_size)
    assert_same_bits(part.dequantize(), expected)


def test_one_group_and_names_of_autoawq(tmp_path: Path) -> None:
    tensors = gemm(16, 40, 40)
    own = {
        "quant_method": "awq",
        "w_bit": 4,
        "q_group_size": -1,
        "version": "GEMM",
        "backend": "auto",
    }
    expected = statement.awq_gemm(*tensors.values(), group_size=40)
    assert_same_bits(open_part(tmp_path, tensors, own).dequantize(), expected)


@pytest.mark.parametrize(
    ("rows", "cols", "group_size", "width"),
    [(12, 256, 128, 1), (5, 192, 64, 2), (7, 320, 32, 4), (300, 64, 64, 2)],
)
def test_gemv(tmp_path: Path, rows: int, cols: int, group_size: int, width: int) -> None:
    random = np.random.default_rng(rows)
    tensors: Tensors = {
        "m.qweight": words(random, rows, cols // 8),
        "m.qzeros": words(random, rows, width),
        "m.scales": random.standard_normal((rows, width * 8)).astype(np.float16),
    }
    part = open_part(tmp_path, tensors, config(group_size, version="gemv"))
    expected = statement.awq_gemv(*tensors.values(), group_size=group_size)
    assert_same_bits(part.dequantize(), expected)


def test_modules_left_alone(tmp_path: Path) -> None:
    dense = {"m.gate.weight": np.ones((3, 2), np.float16), "m.up.bias": np.ones(2, np.float16)}
    packed = {key.replace("m.", "m.up."): value for key, value in gemm(16, 32, 32).items()}
    options = config(32, modules_to_not_convert=["gate"])
    source = open_source(tmp_path, {**dense, **packed}, options)
    assert set(source.names()) == {"m.gate.weight", "m.up.bias", "m.up.weight"}
    assert source.part("m.gate.weight").layout.kind == "dense"
    assert source.part("m.up.weight").layout.kind == "awq"
    with pytest.raises(WeightFormatError, match=r"'m\.up\.wait'.*nearest: m\.up\.qweight|has no"):
        source.part("m.up.wait")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m.qzeros": np.ones((2, 3), np.int32)}, r"'m\.qzeros' has shape \[2, 3\].*\[2, 2\]"),
        ({"m.scales": np.ones((3, 16), np.float16)}, r"'m\.scales' has .*\[3, 16\].*\[2, 16\]"),
        ({"m.qweight": np.ones((64, 2), np.int8)}, r"'m\.qweight' is stored as i8.*i32"),
        ({"m.qweight": np.ones((64,), np.int32)}, r"'m\.qweight' has shape \[64\]"),
    ],
)
def test_damaged_tensors(tmp_path: Path, changed: Tensors, message: str) -> None:
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, {**gemm(16, 64, 32), **changed}, config(32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, r"bits = 8 .*known: 4"),
        ({"version": "gemv_fast"}, r"version = gemv_fast .*known: gemm, exllama, gemv"),
        ({"format": "marlin"}, r"format = marlin .*known: gemm"),
        ({"backend": "llm-awq"}, r"backend = llm-awq .*known: auto, .*autoawq"),
        ({"version": "llm-awq"}, r"version = llm-awq .*known: gemm"),
        ({"zero_point": False}, r"zero_point = False .*known: True"),
        ({"group_size": 0}, "group_size = 0"),
    ],
)
def test_options_that_are_not_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, gemm(16, 64, 32), {**config(32), **change})
