"""Rows as int8 or float8 with one scale each, to be multiplied with activations that are quantised
for each token: W8A8 and FP8 by channel in the words of compressed-tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.weights.part import DType, QuantLayout, RawTensor, WeightPart

from vllmx_models.quantization.affine import decode_coded
from vllmx_models.quantization.ct_weights import coded_int8
from vllmx_models.quantization.matrices import Options, decode_fp8

INT8_MAX = np.float32(127)
E4M3_MAX = np.float32(448)
_ACTIVATIONS: Options = {
    "activations": "dynamic",
    "activation_bits": 8,
    "activation_strategy": "token",
    "activation_symmetric": True,
    "strategy": "channel",
}


def int8_layout(cols: int) -> QuantLayout:
    """The layout of what `int8_part` makes."""
    return QuantLayout(
        "int8", 8, cols, {**_ACTIVATIONS, "activation_type": "int", "symmetric": True}
    )


def fp8_layout(cols: int) -> QuantLayout:
    """The layout of what `fp8_part` makes."""
    blocks: Options = {"block_rows": 1, "block_cols": cols, "dtype": "f8e4m3"}
    return QuantLayout("fp8", 8, None, {**_ACTIVATIONS, "activation_type": "float", **blocks})


def int8_codes(values: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """(rows, cols) finite values as codes and (rows, 1) scales; the greatest of each row in
    magnitude becomes 127 or -127."""
    scale = _scale(values, INT8_MAX)
    return np.rint(_over(values, scale)).astype(np.int8), scale


def fp8_codes(values: F32) -> tuple[npt.NDArray[np.uint8], F32]:
    """The same as e4m3; the greatest of each row becomes 448 or -448."""
    scale = _scale(values, E4M3_MAX)
    return e4m3_codes(_over(values, scale)), scale


def int8_part(
    name: str, shape: tuple[int, ...], codes: npt.NDArray[np.uint8], scales: F32
) -> WeightPart:
    """The part made of the bytes of the codes and one scale for each row."""
    buffers = _buffers(name, "i8", shape, codes, scales)
    return WeightPart(name, shape, int8_layout(shape[1]), buffers, decode_coded, coded_int8)


def fp8_part(
    name: str, shape: tuple[int, ...], codes: npt.NDArray[np.uint8], scales: F32
) -> WeightPart:
    """The part made of the codes and one scale for each row."""
    buffers = _buffers(name, "f8e4m3", shape, codes, scales)
    return WeightPart(name, shape, fp8_layout(shape[1]), buffers, decode_fp8)


def e4m3_codes(values: F32) -> npt.NDArray[np.uint8]:
    """Rounded to nearest, ties to even; magnitudes up to 448."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    kept = magnitude >> np.uint32(20)  # exponent and three bits of mantissa
    rounded = (magnitude + np.uint32(0x7FFFF) + (kept & np.uint32(1))) >> np.uint32(20)
    normal = rounded.astype(np.int32) - ((127 - 7) << 3)
    subnormal = np.rint(magnitude.view(np.float32) * np.float32(512)).astype(np.int32)
    code = np.where(magnitude < np.uint32(121 << 23), subnormal, normal)  # below 2 ** -6
    return (code.astype(np.uint32) | (bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)


def _scale(values: F32, greatest: np.float32) -> F32:
    """(rows, 1), 0 for a row of zeros."""
    found: F32 = np.abs(values).max(axis=1, keepdims=True) / greatest
    return found


def _over(values: F32, scale: F32) -> F32:
    """values / scale, 0 where the scale is so small that its inverse is not finite."""
    result: F32 = np.zeros_like(values)
    np.divide(values, scale, out=result, where=scale > 1e-37)
    return result


def _buffers(
    name: str,
    dtype: DType,
    shape: tuple[int, ...],
    codes: npt.NDArray[np.uint8],
    scales: F32,
) -> dict[str, RawTensor]:
    return {
        "weight": RawTensor(name, dtype, shape, codes),
        "scale": RawTensor(f"{name}_scale", "f32", (shape[0], 1), scales.view(np.uint8)),
    }
