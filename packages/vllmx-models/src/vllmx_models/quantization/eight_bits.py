"""Rows as int8 or float8 with one scale each, to be multiplied with activations that are quantised
for each token: W8A8 and FP8 by channel in the words of compressed-tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.weights import DType, QuantLayout, RawTensor, WeightPart

from vllmx_models.quantization.affine import decode_coded
from vllmx_models.quantization.ct_weights import coded_int8
from vllmx_models.quantization.matrices import Options, decode_fp8

INT8_MAX = np.float32(127)
E4M3_MAX = np.float32(448)
_ACTIVATIONS: Options = {
    "activations": "dynamic", "activation_bits": 8, "activation_strategy": "token",
    "activation_symmetric": True, "strategy": "channel",
}  # fmt: skip


def int8_layout(cols: int) -> QuantLayout:
    """Of `int8_rows`."""
    return QuantLayout(
        "int8", 8, cols, {**_ACTIVATIONS, "activation_type": "int", "symmetric": True}
    )


def fp8_layout(cols: int) -> QuantLayout:
    """Of `fp8_rows`."""
    blocks: Options = {"block_rows": 1, "block_cols": cols, "dtype": "f8e4m3"}
    return QuantLayout("fp8", 8, None, {**_ACTIVATIONS, "activation_type": "float", **blocks})


def int8_rows(name: str, values: F32) -> WeightPart:
    """(rows, cols) finite values; the greatest of each row in magnitude becomes 127 or -127."""
    scale = _scale(values, INT8_MAX)
    codes = np.rint(_over(values, scale)).astype(np.int8)
    layout = int8_layout(values.shape[1])
    buffers = _buffers(name, "i8", codes, scale)
    return WeightPart(name, values.shape, layout, buffers, decode_coded, coded_int8)


def fp8_rows(name: str, values: F32) -> WeightPart:
    """(rows, cols) finite values as e4m3; the greatest of each row becomes 448 or -448."""
    scale = _scale(values, E4M3_MAX)
    codes = e4m3_codes(_over(values, scale))
    layout = fp8_layout(values.shape[1])
    return WeightPart(
        name, values.shape, layout, _buffers(name, "f8e4m3", codes, scale), decode_fp8
    )


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
    name: str, dtype: DType, codes: npt.NDArray[np.generic], scale: F32
) -> dict[str, RawTensor]:
    return {
        "weight": RawTensor(name, dtype, codes.shape, codes.reshape(-1).view(np.uint8)),
        "scale": RawTensor(f"{name}_scale", "f32", scale.shape, scale.reshape(-1).view(np.uint8)),
    }
