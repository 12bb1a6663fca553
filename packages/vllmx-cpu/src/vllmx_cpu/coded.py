"""Rows of codes with the scale and zero of each unit of columns, as the packer takes them."""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import F32, AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import float8_to_f32

from vllmx_cpu.kinds import column_order, packed_columns
from vllmx_cpu.structs import AFFINE_KINDS, FLOAT8_COLS

COLS_OF = {kind: cols for (_, cols), kind in AFFINE_KINDS.items()}


class UnitRows(Record):
    """Arguments of vx_pack_coded."""

    codes: AnyArray  # (n, cols) uint8
    scales: F32  # (n, units)
    zeros: AnyArray | None  # (n, units) int16


def affine_rows(part: WeightPart, kind: str, cols: int, begin: int, end: int) -> UnitRows:
    """Rows of a part that has integers, `cols` packed columns with the input features in
    `column_order`."""
    rows, is_moved = part.coded_rows(begin, end), column_order(part) is not None
    order = packed_columns(part, cols)
    feature = order[:: COLS_OF[kind]]  # the first of each unit; behind all groups it is none
    if rows.group_of is None:
        group = feature // (part.shape[1] // rows.scales.shape[1])
    else:
        group = rows.group_of[feature]
    codes = rows.codes
    if is_moved or cols > part.shape[1]:
        codes = np.where(order < 0, np.uint8(0), codes[:, order])
    shape = (end - begin, len(feature))
    zeros = np.zeros(shape, np.int16) if rows.zeros is None else rows.zeros[:, group]
    return UnitRows(
        np.ascontiguousarray(codes, np.uint8),
        np.ascontiguousarray(rows.scales[:, group], np.float32),
        np.ascontiguousarray(zeros, np.int16),
    )


def float8_rows(part: WeightPart, begin: int, end: int) -> UnitRows:
    """Rows of a part of layout "fp8"."""
    if not isinstance(part, StoredPart):
        part, begin, end = part.rows(begin, end), 0, end - begin
    raw, options = part.buffers["scale"].in_memory(), part.layout.options
    scales = float8_to_f32(raw.view(), "f8e8m0") if raw.dtype == "u8" else raw.to_f32()  # type: ignore[arg-type]
    row, unit = np.arange(begin, end), np.arange(0, part.shape[1], FLOAT8_COLS)
    if options["strategy"] == "block":
        row, unit = row // int(options["block_rows"]), unit // int(options["block_cols"])
        found = scales[np.ix_(row, unit)]
    else:
        whole = np.broadcast_to(scales.reshape(-1, 1), (part.shape[0], len(unit)))
        found = whole[begin:end]
    codes = np.asarray(part.buffers["weight"].rows(begin, end).view())
    return UnitRows(np.ascontiguousarray(codes), np.ascontiguousarray(found, np.float32), None)
