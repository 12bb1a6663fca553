"""Weights that are floats of 8 or 4 bits, in MLX's modes mxfp8, mxfp4 and nvfp4: where the scales
fit into a mode, or what they are beyond it is one factor for each row of the product."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.tensor import RawTensor

from vllmx_metal.matrices import Form, QuantisedMatrix

U8 = npt.NDArray[np.uint8]
_MXFP8, _MXFP4, _NVFP4 = Form("mxfp8", 8, 32), Form("mxfp4", 4, 32), Form("nvfp4", 4, 16)
_EXPONENTS = ("u8", "f8e8m0")
_ONE = 127
"""2 ** 0 as an exponent of 8 bits."""
MOST_VALUES = 1 << 24
"""Values that are made together where a part is quantised while it loads."""


def float_form(part: WeightPart) -> Form | None:
    """The form of a part of kind "fp8" or "fp4", or of GGUF's MXFP4; None: no mode has its
    values."""
    layout, cols = part.layout, part.shape[1]
    if layout.kind == "fp8":
        return _MXFP8 if cols % 32 == 0 and _fp8_fits(part) else None
    if layout.is_mxfp4 or layout.gguf_type == "MXFP4":
        return _MXFP4
    nvfp4 = layout.group_size == 16 and layout.options.get("scale") == "f8e4m3"
    return _NVFP4 if nvfp4 else None


def _fp8_fits(part: WeightPart) -> bool:
    options = part.layout.options
    if options["dtype"] != "f8e4m3":
        return False
    if options["strategy"] != "block":
        return True
    return (
        part.rows(0, 1).buffers["scale"].dtype in _EXPONENTS
        and int(options["block_cols"]) % 32 == 0
    )


def float_matrix(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    """The part in its `float_form`."""
    if part.layout.gguf_type is not None:
        return _of_blocks(part, form, dtype)
    if part.layout.kind == "fp4":
        return _fp4(part, form, dtype)
    if part.layout.options["strategy"] == "block":
        return _fp8_blocks(part, form, dtype)
    return _fp8_rows(part, form, dtype)


def _of_blocks(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    """GGUF: an exponent, then 16 bytes whose low halves are the first 16 values."""
    rows = part.shape[0]
    blocks = part.stored().buffers["weight"].data.reshape(-1, 17)
    halves = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)  # (blocks, 32)
    codes = halves[:, 0::2] | halves[:, 1::2] << 4
    return form.matrix(_words(codes, rows), mx.array(blocks[:, 0].reshape(rows, -1)), dtype)


def _fp4(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    buffers = part.stored().buffers
    codes, scales = _bytes(buffers["weight"]), _bytes(buffers["scale"])
    rows, factor = part.shape[0], None
    if part.layout.options["global_scale"] != "none":
        whole = buffers["global_scale"].to_f32().reshape(())
        if part.layout.options["global_scale"] == "divide":
            whole = np.float32(1) / whole
        factor = mx.array(np.full(rows, whole, np.float32))
        if dtype == mx.float16:  # codes times scales may be thousands: their sum, beyond its range
            dtype = mx.float32
    return form.matrix(_words(codes, rows), mx.array(scales), dtype, factor)


def _fp8_rows(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    """A scale for each row or one for all: its power of two goes to the groups, the rest, between
    1 and 2, is the row's factor. So the product is about as large as what comes out."""
    rows, cols = part.shape
    codes, factors = [], []
    step = max(1, MOST_VALUES // cols)
    for begin in range(0, rows, step):
        some = part.rows(begin, min(begin + step, rows))
        codes.append(mx.array(np.ascontiguousarray(some.buffers["weight"].view()).view(np.uint32)))
        scale = _scales(some.buffers["scale"]).reshape(-1)
        factors.append(np.broadcast_to(scale, some.shape[:1]))
    factor = np.concatenate(factors)
    mantissa, exponent = np.frexp(factor)
    usual = (mantissa != 0) & np.isfinite(factor) & (np.abs(exponent) < 120)
    exponent = np.where(usual, exponent - 1, 0)
    scales = np.repeat((exponent + _ONE).astype(np.uint8)[:, None], cols // 32, axis=1)
    rest = np.where(usual, 2 * mantissa, factor).astype(np.float32)
    return form.matrix(mx.concatenate(codes), mx.array(scales), dtype, mx.array(rest))


def _fp8_blocks(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    rows, cols = part.shape
    options, buffers = part.layout.options, part.stored().buffers
    scales = _bytes(buffers["scale"])
    scales = scales.repeat(int(options["block_rows"]), axis=0)[:rows]
    scales = scales.repeat(int(options["block_cols"]) // 32, axis=1)[:, : cols // 32]
    codes = _bytes(buffers["weight"])
    return form.matrix(_words(codes, rows), mx.array(np.ascontiguousarray(scales)), dtype)


def _scales(raw: RawTensor) -> F32:
    """The scales as numbers; unsigned bytes are exponents, as F8_E8M0 has them."""
    if raw.dtype == "u8":
        raw = RawTensor(raw.name, "f8e8m0", raw.shape, raw.data)
    return raw.to_f32()


def _bytes(raw: RawTensor) -> U8:
    found: U8 = np.asarray(raw.view()).view(np.uint8)
    return found


def _words(codes: U8, rows: int) -> mx.array:
    """(rows, bytes / 4) as MLX has them: feature i of a row at bit i * bits."""
    return mx.array(np.ascontiguousarray(codes).reshape(rows, -1).view(np.uint32))
