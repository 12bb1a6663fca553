"""Scales: of a tensor, of rows and of blocks, and the values of 4-bit floats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.weights.tensor import RawTensor, float8_to_f32

from vllmx_models.quantization.affine import U8
from vllmx_models.quantization.options import FLOATS
from vllmx_models.quantization.source import ModuleTensors

Options = Mapping[str, str | int | float | bool]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_BYTES = np.arange(256)
_E2M1_PAIRS = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=1).view(np.uint64)[:, 0]
"""The two float32 values of each byte, that of the low four bits first."""


def e2m1_to_f32(packed: U8) -> F32:
    """(..., 2n) values of (..., n) bytes; the low four bits come first."""
    values: F32 = _E2M1_PAIRS[packed].view(np.float32)
    return values


def scales_to_f32(scale: RawTensor) -> F32:
    """Scales in their shape. Unsigned bytes are exponents, as in F8_E8M0."""
    if scale.dtype == "u8":
        return float8_to_f32(scale.view(), "f8e8m0")  # type: ignore[arg-type]
    return scale.to_f32()


def apply_scales(values: F32, scales: F32, block: tuple[int, int]) -> F32:
    """values[i, j] * scales[i // block[0], j // block[1]], in place; blocks at the edges may be
    smaller. One rounding; NaN and overflow are those of the file."""
    rows, width = block
    with np.errstate(invalid="ignore", over="ignore"):
        if rows == 1:
            _multiply(values, scales, width)
        else:
            for index, row in enumerate(scales):
                _multiply(values[index * rows : (index + 1) * rows], row[None], width)
    return values


def _multiply(values: F32, scales: F32, width: int) -> None:
    """Multiplies in place; scales are (rows or 1, groups of `width` columns)."""
    cols = values.shape[1]
    if cols % width == 0:
        grouped = values.reshape(len(values), -1, width)
        grouped *= scales[:, :, None]
    else:
        values *= np.repeat(scales, width, axis=1)[:, :cols]


def input_scale(tensors: ModuleTensors, suffix: str = ".input_scale") -> dict[str, RawTensor]:
    """Returns the static scale of the activations, if the checkpoint has one."""
    if tensors.get(suffix) is None:
        return {}
    return {"input_scale": tensors.shaped(suffix, FLOATS, (), (1,))}


def row_scale(values: F32, greatest: np.float32) -> F32:
    """Returns the (rows, 1) scales that make the greatest magnitude of each row `greatest`; 0 for
    rows of zeros."""
    found: F32 = np.abs(values).max(axis=1, keepdims=True) / greatest
    return found


def over(values: F32, scale: F32) -> F32:
    """Returns values / scale, 0 where the inverse of the scale is not finite."""
    result: F32 = np.zeros_like(values)
    np.divide(values, scale, out=result, where=scale > 1e-37)
    return result
