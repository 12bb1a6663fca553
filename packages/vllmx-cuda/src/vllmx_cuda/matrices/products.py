"""Products of cuBLASLt: with rows that lie there, and with rows that are dequantised for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllmx_cuda.device.device import Device, Product
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.matrices.form import Launcher, Operands, Segment

WORK_BYTES = 64 << 20
"""Dequantised rows of one product: enough columns of y to keep a GPU busy, and hardly more than
its L2 holds, so that they need not come back from memory."""
_ROWS = 256
"""Rows of a piece are a multiple of it where a piece has so many: no product is cut oddly."""

Dequantise = Callable[[int, int], None]
"""dequantise(first, rows) writes these rows of a segment to the front of the work buffer."""


def multiply_dense(
    device: Device, m: int, n: int, k: int, dtype: str, w: Memory, operands: Operands
) -> None:
    """x (m, k) @ w (n, k).T + bias into the first n columns at `operands.y`."""
    out = operands.out_dtype
    bias = operands.bias if out == "f32" else operands.rounded_bias
    aligned = alignment(operands.x, w, operands.y, *(() if bias is None else (bias,)))
    product = Product(m, n, k, dtype, out, bias is not None, operands.pitch, aligned)
    device.multiply(product, operands.x, w, operands.y, bias)


def alignment(*spans: Memory) -> int:
    """The greatest power of two that divides all addresses, 256 at most: columns of a product need
    not begin where vectors do."""
    lowest = 256
    for span in spans:
        lowest |= span.address
    return lowest & -lowest


def work_bytes(rows: int, cols: int, dtype: str) -> int:
    """The bytes of the work buffer that `by_pieces` needs, for this type or a smaller one."""
    row_bytes = cols * ITEM_BYTES[dtype]
    return min(rows * row_bytes, max(WORK_BYTES, row_bytes))


def by_pieces(
    launcher: Launcher, segment: Segment, operands: Operands, dequantise: Dequantise
) -> Callable[[int], None]:
    """Products with rows that are dequantised a piece at a time."""
    dtype, out_bytes = launcher.target.dtype, ITEM_BYTES[operands.out_dtype]
    step = _rows_at_once(segment.rows, segment.cols, dtype)

    def multiply(m: int) -> None:
        for first in range(0, segment.rows, step):
            rows = min(step, segment.rows - first)
            dequantise(first, rows)
            part = columns(operands, first, rows, out_bytes)
            multiply_dense(
                launcher.device, m, rows, segment.cols, dtype, launcher.products.work, part
            )

    return multiply


def columns(operands: Operands, first: int, rows: int, out_bytes: int) -> Operands:
    """The operands of some of the columns."""
    bias, rounded = operands.bias, operands.rounded_bias
    return replace(
        operands,
        y=operands.y.at(first * out_bytes),
        bias=bias and bias.at(4 * first, 4 * rows),
        rounded_bias=rounded and rounded.at(out_bytes * first, out_bytes * rows),
    )


def _rows_at_once(rows: int, cols: int, dtype: str) -> int:
    most = max(1, WORK_BYTES // (cols * ITEM_BYTES[dtype]))
    return min(rows, most // _ROWS * _ROWS or most)
