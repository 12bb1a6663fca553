"""MLX's own quantised checkpoints, as mlx-lm writes them: `quantization` in config.json.

X.weight (rows, cols * bits / 32) u32: each row is a string of bits, input feature i at bit
i * bits. The mode says what the codes are:

affine: integers of 2 to 8 bits; weight = code * scale + bias, X.scales and X.biases
    (rows, cols / group) float.
mxfp4, mxfp8: e2m1 or e4m3 values times 2 ** (scale - 127); X.scales (rows, cols / 32) u8.
nvfp4: e2m1 values times a scale of e4m3; X.scales (rows, cols / 16) u8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.part import Layout, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import float8_to_f32

from vllmx_models.quantization.affine import U8, unpack
from vllmx_models.quantization.options import FLOATS, QuantReader
from vllmx_models.quantization.scaled import e2m1_to_f32
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

ROWS_AT_ONCE = 256
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


class Mode(Record):
    """The codes and scales of a mode whose codes are floats."""

    bits: int
    group_size: int
    scale_dtype: str


FLOAT_MODES: Mapping[str, Mode] = {
    "mxfp4": Mode(4, 32, "f8e8m0"),
    "nvfp4": Mode(4, 16, "f8e4m3"),
    "mxfp8": Mode(8, 32, "f8e8m0"),
}


class Mlx(Layout):
    """Words of input features; the option "mode" says what their codes are."""

    kind: ClassVar[str] = "mlx"

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        """See `Layout.decode`; in mode affine the product and the sum are rounded."""
        cols = part.shape[-1]
        words, scales, biases = (
            None if raw is None else np.asarray(raw.rows(begin, end).view())
            for raw in (part.buffers.get(key) for key in ("weight", "scales", "biases"))
        )
        assert words is not None
        assert scales is not None
        result = np.empty((len(words), cols), np.float32)
        for first in range(0, len(words), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            values = _values(self, words[rows], cols)
            grouped = values.reshape(len(values), scales.shape[1], -1)
            with np.errstate(invalid="ignore", over="ignore"):  # NaN and overflow are the file's
                grouped = grouped * _scales(part, scales[rows])[:, :, None]
                if biases is not None:
                    grouped += _floats(part, "biases", biases[rows])[:, :, None]
            result[rows] = grouped.reshape(len(values), cols)
        return result.reshape(end - begin, *part.shape[1:])


def mlx(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, MlxScheme(config))


class MlxScheme:
    weight_suffix = ".weight"
    markers = (".scales",)
    companions = (".biases",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._whole = QuantReader(config, "mlx")
        layout = _layout(self._whole)
        self.name = f"mlx {layout.options['mode']} {layout.bits:g} bit"

    def excludes(self, module: str) -> bool:
        return self._whole.config.get(module) is False

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        layout = self._layout_of(tensors.stem)
        bits, group_size = int(layout.bits), layout.group_size or 1
        weight = tensors.need(".weight", ("u32",))
        *lead, words = weight.shape if weight.shape else (0,)
        cols = words * 32 // bits
        if not lead or not all(lead) or not words or words * 32 % bits or cols % group_size:
            found = f"has shape {list(weight.shape)}"
            raise tensors.error(
                ".weight", found, f"rows of {bits}-bit codes in groups of {group_size}"
            )
        grid = (*lead, cols // group_size)
        buffers = {"weight": weight}
        if layout.options["mode"] == "affine":
            buffers["scales"] = tensors.shaped(".scales", FLOATS, grid)
            buffers["biases"] = tensors.shaped(".biases", FLOATS, grid)
        else:
            buffers["scales"] = tensors.shaped(".scales", ("u8",), grid)
        return StoredPart(name, (*lead, cols), layout, buffers)

    def _layout_of(self, module: str) -> Mlx:
        """The layout of a module, whose own entry overrides the common one."""
        own = self._whole.config.get(module)
        if not isinstance(own, Mapping):
            return _layout(self._whole)
        return _layout(QuantReader(own, f"mlx module {module}"))


def _layout(read: QuantReader) -> Mlx:
    mode = read.choice("mode", ("affine", *FLOAT_MODES), "affine")
    if mode == "affine":
        bits = read.choice("bits", AFFINE_BITS, 4)
        group_size = read.choice("group_size", AFFINE_GROUPS, 64)
    else:
        known = FLOAT_MODES[mode]
        bits = read.choice("bits", (known.bits,), known.bits)
        group_size = read.choice("group_size", (known.group_size,), known.group_size)
    return Mlx(bits, group_size, {"mode": mode})


def _values(layout: Mlx, words: npt.NDArray[Any], cols: int) -> F32:
    codes: U8 = np.ascontiguousarray(words).view(np.uint8)
    mode = layout.options["mode"]
    if mode == "affine":
        return unpack(words, int(layout.bits), cols).astype(np.float32)
    return float8_to_f32(codes, "f8e4m3") if mode == "mxfp8" else e2m1_to_f32(codes)


def _scales(part: StoredPart, scales: npt.NDArray[Any]) -> F32:
    mode = str(part.layout.options["mode"])
    if mode in FLOAT_MODES:
        return float8_to_f32(scales, FLOAT_MODES[mode].scale_dtype)
    return _floats(part, "scales", scales)


def _floats(part: StoredPart, key: str, stored: npt.NDArray[Any]) -> F32:
    if part.buffers[key].dtype == "bf16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)
