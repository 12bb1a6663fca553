"""Quantised parts of a checkpoint as matrices that MLX multiplies without expanding them."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, I32
from vllmx_core.weights.coded import FILLED_UNIT, features_of, filled_order
from vllmx_core.weights.part import WeightPart

from vllmx_metal.arrays import to_mlx
from vllmx_metal.float_codes import float_form, float_matrix
from vllmx_metal.gguf_affine import GROUP, KINDS
from vllmx_metal.matrices import Form, QuantisedMatrix

GROUPS = (128, 64, 32)
"""Sizes of affine groups that MLX's kernels have."""
MOST_VALUES = 1 << 24
"""Values that are converted together, in whole rows: what they take meanwhile stays small."""
_HALF_ULP = 2.0**-11
"""The largest relative change by rounding to float16, where it does not underflow."""

Affine = tuple[npt.NDArray[np.uint8], F32, F32]
"""Codes (rows, cols), scales and biases (rows, groups)."""


def native_form(part: WeightPart) -> Form | None:
    """None: the part is dequantised at load."""
    layout = part.layout
    if len(part.shape) != 2:
        return None
    bits = int(layout.bits)
    if layout.kind == "mlx":
        mode, group_size = str(layout.options["mode"]), layout.group_size or 1
        return Form(mode, bits, group_size) if mode != "affine" or group_size in GROUPS else None
    if layout.gguf_type is not None and layout.gguf_type != "MXFP4":
        kind = KINDS.get(layout.gguf_type)
        return None if kind is None else Form("affine", kind.bits, GROUP)
    if layout.has_codes:
        return _integer_form(part, 8 if bits == 7 else bits)
    return float_form(part)


def _integer_form(part: WeightPart, bits: int) -> Form | None:
    """The form of a part that has integers. Shuffled input features are sorted by their groups,
    which are filled up where they are uneven and then take less than 16 bits a weight."""
    rows, cols = part.shape
    given = min(part.layout.group_size or cols, cols)
    size = next((size for size in GROUPS if given % size == 0 and cols % given == 0), None)
    group_of = part.group_of
    if group_of is None:
        return None if size is None else Form("affine", bits, size)
    sizes = np.bincount(group_of)
    if size is not None and (sizes[sizes > 0] == given).all():
        in_order = (np.diff(group_of) >= 0).all()
        order = np.argsort(group_of, kind="stable").astype(np.int32)
        return Form("affine", bits, size, b"" if in_order else order.tobytes())
    form = Form("affine", bits, FILLED_UNIT, filled_order(group_of).tobytes())
    return form if form.num_bytes(rows, cols) < 2 * rows * cols else None


def quantised_matrix(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    """The part in its `native_form`."""
    if part.layout.kind == "mlx":
        return _as_it_is(part, form, dtype)
    if form.mode != "affine":
        return float_matrix(part, form, dtype)
    if part.layout.gguf_type is not None:
        return _joined(_gguf_rows(part), form, dtype, None)
    order = np.frombuffer(form.order, np.int32) if form.order else None
    return _joined(_integer_rows(part, form, order), form, dtype, order)


def _as_it_is(part: WeightPart, form: Form, dtype: mx.Dtype) -> QuantisedMatrix:
    buffers = part.stored().buffers
    codes = mx.array(np.ascontiguousarray(buffers["weight"].view()))
    if form.mode == "affine":
        scales, biases = (to_mlx(buffers[key]) for key in ("scales", "biases"))
        scales, biases = _narrowed(scales, biases, dtype)
        return QuantisedMatrix(codes, scales, biases, form.group_size, form.bits, "affine", dtype)
    return form.matrix(codes, mx.array(np.ascontiguousarray(buffers["scales"].view())), dtype)


def _gguf_rows(part: WeightPart) -> Iterator[Affine]:
    """Some rows after the other."""
    kind = KINDS[part.layout.gguf_type or ""]
    rows, cols = part.shape
    step = max(1, MOST_VALUES // cols)
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        blocks = part.rows(begin, begin + count).buffers["weight"].data.reshape(-1, kind.num_bytes)
        with np.errstate(all="ignore"):  # a scale that is not finite gives values that are not
            codes, scales, biases = kind.convert(blocks)
        yield codes.reshape(count, cols), scales.reshape(count, -1), biases.reshape(count, -1)


def _integer_rows(part: WeightPart, form: Form, order: I32 | None) -> Iterator[Affine]:
    """Some rows after the other: (code - zero) * scale is code * scale + bias with
    bias = -zero * scale. A group that is larger than the form's is repeated."""
    rows, cols = part.shape
    features = np.arange(cols, dtype=np.int32) if order is None else features_of(order)
    step = max(1, MOST_VALUES // cols)
    for begin in range(0, rows, step):
        some = part.coded_rows(begin, min(begin + step, rows))
        scales, zeros = some.factors(features[:: form.group_size])
        lowest = np.zeros((), np.float32) if zeros is None else -zeros.astype(np.float32)
        yield some.codes if order is None else some.codes[:, features], scales, lowest * scales


def _joined(
    pieces: Iterator[Affine], form: Form, dtype: mx.Dtype, order: I32 | None
) -> QuantisedMatrix:
    columns: list[list[mx.array]] = [[], [], []]
    for integers, *factors in pieces:
        for column, array in zip(columns, (pack(integers, form.bits), *factors), strict=True):
            column.append(mx.array(np.ascontiguousarray(array)))
    codes, scales, biases = (mx.concatenate(column) for column in columns)
    scales, biases = _narrowed(scales, biases, dtype)
    index = None if order is None else mx.array(order)
    return QuantisedMatrix(
        codes, scales, biases, form.group_size, form.bits, "affine", dtype, index
    )


def _narrowed(scales: mx.array, biases: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Converts scales and biases to the model's dtype, so that they take half as much, where that
    changes nothing but by the rounding of float16; else to float32."""
    allowed = _HALF_ULP if dtype == mx.float16 else 0.0

    def held(array: mx.array) -> bool:
        wide = array.astype(mx.float32)
        change = mx.abs(wide.astype(dtype).astype(mx.float32) - wide)
        return bool((change <= allowed * mx.abs(wide)).all())  # NaN is never held

    kept = dtype if held(scales) and held(biases) else mx.float32
    return scales.astype(kept), biases.astype(kept)


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """(rows, cols) -> (rows, cols * bits / 32); cols is a multiple of 32."""
    rows, cols = codes.shape
    if bits == 8:
        packed = np.ascontiguousarray(codes)
    elif bits in (2, 4):
        packed = np.zeros((rows, cols * bits // 8), np.uint8)
        for place in range(8 // bits):
            packed |= codes[:, place :: 8 // bits] << np.uint8(place * bits)
    else:  # eight codes fill `bits` bytes
        word = np.zeros((rows, cols // 8), np.uint64)
        for place in range(8):
            word |= codes[:, place::8].astype(np.uint64) << np.uint64(place * bits)
        octets = word.astype("<u8").view(np.uint8).reshape(rows, -1, 8)[..., :bits]
        packed = np.ascontiguousarray(octets).reshape(rows, -1)
    return packed.view("<u4")
