"""What a weight map picks of a checkpoint's tensors, in every layout, beside numpy on the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.map import assemble, bias_of, parts_of
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import cols_of, entry_of, rows_of
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.encoders import encode
from vllmx_models.quantization.float8 import fp8_codes, fp8_part
from vllmx_models.quantization.int8 import int8_codes, int8_part
from vllmx_testing.synthetic import ArraySource

from ..null.quantization.checkpoints import open_part  # noqa: TID252 - no package to name
from . import quantizers

Array = np.ndarray[Any, Any]
ROWS, COLS = 96, 512


class Parts(ArraySource):
    """A source of arrays and of parts that are there already."""

    def __init__(self, arrays: Mapping[str, Array], parts: Mapping[str, WeightPart] = {}) -> None:
        super().__init__(dict(arrays))
        self._given = parts

    def names(self) -> Any:
        return {*super().names(), *self._given}

    def part(self, name: str) -> WeightPart:
        return self._given.get(name) or super().part(name)


def gguf(kind: str, values: Array) -> WeightPart:
    flat = encode(kind, values.reshape(-1, values.shape[-1]))
    return weight_part("m.weight", TYPES_BY_NAME[kind], values.shape, flat)


def made(layout: str, values: Array, folder: Any) -> WeightPart:
    match layout:
        case "gptq" | "gptq act-order":
            tensors, _ = quantizers.gptq(
                values, bits=4, group_size=128, shuffled="act" in layout, v2=False
            )
            quantization = {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "sym": False,
                "desc_act": "act" in layout,
            }
        case "awq":
            tensors, _ = quantizers.awq(values, group_size=128)
            quantization = {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
                "version": "gemm",
            }
        case "fp8 blocks":
            tensors, _ = quantizers.fp8(values, block=(32, 128), name="weight_scale_inv")
            quantization = {"quant_method": "fp8", "weight_block_size": [32, 128]}
        case "int8":
            codes, scales = int8_codes(values)
            return int8_part(
                "m.weight", values.shape, codes.reshape(-1).view(np.uint8), scales.reshape(-1)
            )
        case "fp8":
            codes, scales = fp8_codes(values)
            return fp8_part("m.weight", values.shape, codes.reshape(-1), scales.reshape(-1))
        case "dense":
            return Parts({"m.weight": values}).part("m.weight")
        case _:
            return gguf(layout, values)
    return open_part(folder, {f"m.{key}": array for key, array in tensors.items()}, quantization)


LAYOUTS = ("dense", "Q8_0", "Q4_K", "int8", "fp8", "fp8 blocks", "gptq", "gptq act-order", "awq")
STAYS = ("dense", "Q8_0", "Q4_K", "int8", "fp8")
"""Layouts that are what they were after something was picked of them."""


@pytest.fixture(params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[str, WeightPart]:
    values = np.random.default_rng(3).standard_normal((ROWS, COLS)).astype(np.float32)
    return request.param, made(request.param, values, tmp_path)


@pytest.mark.parametrize(
    "index",
    [np.arange(7, 61), RowRuns(4, 8, 24).index(32), RowRuns(1, 1, 2).index(48)[::-1]],
    ids=["run", "heads", "odd backwards"],
)
def test_rows_are_those_of_the_whole(whole: tuple[str, WeightPart], index: Any) -> None:
    layout, part = whole
    picked, wanted = rows_of(part, index), part.dequantize()[index]
    assert picked.shape == wanted.shape
    np.testing.assert_array_equal(picked.dequantize(), wanted)
    np.testing.assert_array_equal(picked.dequantize(5, 21), wanted[5:21])
    if layout in STAYS:
        assert picked.layout == part.layout
        np.testing.assert_array_equal(picked.rows(3, 9).dequantize(), wanted[3:9])
        np.testing.assert_array_equal(picked.rows(3, 9).rows(1, 2).dequantize(), wanted[4:5])
    if part.layout.has_codes:
        np.testing.assert_array_equal(picked.coded_rows(2, 20).to_f32(), wanted[2:20])


def test_columns_are_those_of_the_whole(whole: tuple[str, WeightPart]) -> None:
    layout, part = whole
    units = {"dense": 1, "int8": 1, "fp8": 1, "Q8_0": 32, "Q4_K": 256, "gptq act-order": 32}
    assert part.col_unit == units.get(layout, 128)
    step = part.col_unit if part.col_unit > 1 else 37
    for begin, end in ((0, step), (step, COLS), (step, 2 * step)):
        picked, wanted = cols_of(part, begin, end), part.dequantize()[:, begin:end]
        assert picked.shape == wanted.shape
        np.testing.assert_array_equal(picked.dequantize(), wanted)
        np.testing.assert_array_equal(picked.dequantize(11, 14), wanted[11:14])
        if layout in STAYS:
            assert picked.layout.kind == part.layout.kind
        if part.layout.has_codes:
            np.testing.assert_array_equal(picked.coded_rows(1, 9).to_f32(), wanted[1:9])
        both = rows_of(picked, np.arange(8, 24))
        np.testing.assert_array_equal(both.dequantize(), wanted[8:24])


@pytest.mark.parametrize("layout", ["dense", "Q8_0", "Q4_K", "mxfp4"])
def test_an_entry_of_a_stack(layout: str, tmp_path: Any) -> None:
    values = np.random.default_rng(4).standard_normal((5, 8, 256)).astype(np.float32)
    if layout == "mxfp4":
        random = np.random.default_rng(5)
        blocks = random.integers(0, 256, (5, 8, 8, 16)).astype(np.uint8)
        scales = random.integers(120, 130, (5, 8, 8)).astype(np.uint8)
        quantization = {"quant_method": "mxfp4"}
        tensors = {"m_blocks": blocks, "m_scales": scales}
        part = open_part(tmp_path, tensors, quantization, "m")
    else:
        part = made(layout, values, tmp_path)
    wanted = part.dequantize()
    for entry in (0, 3, 4):
        picked = entry_of(part, entry)
        assert picked.layout == part.layout
        np.testing.assert_array_equal(picked.dequantize(), wanted[entry])
        np.testing.assert_array_equal(picked.rows(2, 5).dequantize(), wanted[entry, 2:5])
    with pytest.raises(WeightFormatError, match="entry 5 is wanted"):
        entry_of(part, 5)


def assembled(source: WeightSource, *parts: PartSpec, cols: int = 6, **more: Any) -> Array:
    kind = more.pop("kind", "linear")
    return assemble(WeightSpec("w", kind, parts, cols, **more), source)[0]


def test_a_map_applies_its_picks_in_their_order() -> None:
    """Experts are stored (in, out) with gate and up interleaved: picked are the gates of the
    second, and of these the columns from the third on."""
    stack = np.arange(3 * 8 * 10, dtype=np.float32).reshape(3, 8, 10)  # (X, in, out)
    bias = np.arange(30, dtype=np.float32).reshape(3, 10)
    source = Parts({"experts": stack, "bias": bias})
    gate = PartSpec(
        "experts", 5, "bias", entry=1, transposed=True, runs=RowRuns(0, 1, 2), first_col=2
    )
    spec = WeightSpec("w", "linear", (gate,), 6)
    np.testing.assert_array_equal(assemble(spec, source)[0], stack[1].T[0::2, 2:])
    np.testing.assert_array_equal(bias_of(spec, source), bias[1, 0::2])
    assert [part.shape for part in parts_of(spec, source)] == [(5, 6)]


def test_rows_turned_over_are_those_of_the_whole(whole: tuple[str, WeightPart]) -> None:
    """A head's rows of a projection of all heads, as the matrix that its queries are multiplied by,
    from every layout: this one is small enough to become numbers."""
    layout, part = whole
    source = Parts({}, {"m": part})
    picked = PartSpec("m", COLS, runs=RowRuns(40, 24, 24), turned=True)
    (found,) = parts_of(WeightSpec("w", "linear", (picked,), 24), source)
    wanted = part.dequantize()[40:64].T
    assert (found.shape, found.layout.kind) == ((COLS, 24), "dense")
    np.testing.assert_array_equal(found.dequantize(), wanted)
    np.testing.assert_array_equal(found.rows(8, 100).dequantize(), wanted[8:100])
    if layout == "dense":
        assert found.stored().buffers["weight"].dtype == part.stored().buffers["weight"].dtype


def test_other_names_and_stacks_and_shapes() -> None:
    random = np.random.default_rng(1)
    matrices = random.standard_normal((4, 3, 6)).astype(np.float32)
    arrays = {f"x.{i}.up": matrices[i] for i in range(4)} | {"conv": matrices[0].reshape(3, 1, 6)}
    source = Parts(arrays)
    parts = tuple(PartSpec(f"x.{i}.w1", 3, alternatives=(f"x.{i}.up",)) for i in range(4))
    found = assembled(source, *parts, kind="stack", count=4)
    np.testing.assert_array_equal(found, matrices)
    spec = WeightSpec("w", "stack", parts, 6, count=4)
    assert [matrix.rows for matrix in spec.matrices] == [3] * 4
    assert spec.rows == 3
    taps = assembled(source, PartSpec("conv", 18), kind="vector", shape=(3, 6), cols=0)
    np.testing.assert_array_equal(taps, matrices[0].reshape(-1))
    with pytest.raises(WeightFormatError, match=r"shape \[3, 1, 6\].*asks for \[6, 3\]"):
        assembled(source, PartSpec("conv", 18), kind="vector", shape=(6, 3), cols=0)


def test_columns_that_cut_a_block_in_two(whole: tuple[str, WeightPart]) -> None:
    """A layer's columns of a table of all layers are as wide as the model has them."""
    layout, part = whole
    picked = PartSpec("m", ROWS, first_col=40)
    (found,) = parts_of(WeightSpec("w", "embedding", (picked,), 90), Parts({}, {"m": part}))
    wanted = part.dequantize()[:, 40:130]
    np.testing.assert_array_equal(found.dequantize(), wanted)
    np.testing.assert_array_equal(found.rows(8, 50).dequantize(), wanted[8:50])
    assert layout not in ("dense", "int8", "fp8") or found.layout.kind == layout


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (PartSpec("m", 4, runs=RowRuns(2, 2, 4)), r"rows 2 to 7 are wanted"),
        (PartSpec("m", 3, runs=RowRuns(0, 2, 2)), r"rows 0 to 1 are wanted"),
        (PartSpec("m", 7, first_col=3), r"columns 3 to 8 are wanted"),
        (PartSpec("m", 7, entry=0), r"\[7, 8\], a stack of 3 axes is wanted"),
        (PartSpec("m", 7, transposed=True), r"asks for \[7, 6\]"),
        (PartSpec("m", 8, runs=RowRuns(3, 6, 6), turned=True), r"rows 3 to 8 are wanted"),
        (PartSpec("s", 8, "s", entry=0), r"\[1, 8, 6\], a stack of 2 axes is wanted"),
        (PartSpec("i", 7), r"'i' holds i8 codes of a quantised checkpoint"),
        (PartSpec("m", 7, "i", first_col=2), r"'i' holds i8 codes of a quantised checkpoint"),
        (PartSpec("n", 7, alternatives=("o",)), "no tensor 'n'"),
        (PartSpec("q", 256, transposed=True), "q'? is stored as gguf with its axes|other way"),
    ],
)
def test_what_a_tensor_has_not_is_told(part: PartSpec, message: str) -> None:
    values = np.zeros((7, 8), np.float32)
    arrays = {"m": values, "s": np.zeros((1, 8, 6), np.float32)}
    codes = RawTensor("i", "i8", (7, 6), np.zeros(42, np.uint8))
    parts = {
        "q": gguf("Q8_0", np.ones((6, 256), np.float32)),
        "i": StoredPart("i", codes.shape, DENSE, {"weight": codes}),
    }
    source = Parts(arrays, parts)
    with pytest.raises(WeightFormatError, match=message):
        assembled(source, part)
