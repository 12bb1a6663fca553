"""Chooses the parts of a checkpoint that stay in their quantised type, and cuts fused matrices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

import numpy as np
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.coded import FILLED_UNIT, filled_order
from vllmx_core.weights.map import parts_of
from vllmx_core.weights.part import WeightPart, WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_cpu.structs import AFFINE_KINDS, BLOCK_KINDS, FLOAT8_COLS, FLOAT8_KIND

_FACTOR_BITS = 48
"""The bits of a row's scale and zero for each unit."""


class NativeKind(Record):
    """A part as the kernels hold it."""

    name: str
    order: bytes = b""
    """`column_order`; what is multiplied together must agree in it."""


def native_kind(spec: WeightSpec, source: WeightSource) -> str | None:
    """The kind that all parts have in common, if the kernels multiply it. The matrices of a stack
    may differ in the order of their columns."""
    names = set()
    for matrix in spec.matrices:
        kinds = {_part_kind(part) for part in parts_of(matrix, source)}
        kind = kinds.pop()
        if kinds or kind is None or spec.offset != 0.0 or (kind.order and matrix.kind != "linear"):
            return None
        names.add(kind.name)
    return names.pop() if len(names) == 1 else None


def segments(
    spec: WeightSpec, source: WeightSource, gated: Collection[str]
) -> tuple[WeightSpec, ...]:
    """A matrix to multiply whose parts have different types (q and k in one, v in a finer one) as
    several, one below the other, each of one type; any other spec as it is."""
    if spec.kind != "linear" or spec.name in gated:
        return (spec,)
    kinds = map(_part_kind, parts_of(spec, source))
    pairs = groupby(zip(kinds, spec.parts, strict=True), lambda pair: pair[0])
    runs = [tuple(part for _, part in run) for _, run in pairs]
    if len(runs) == 1:
        return (spec,)
    return tuple(
        replace(spec, name=f"{spec.name}[{index}]", parts=run) for index, run in enumerate(runs)
    )


def column_order(part: WeightPart) -> I32 | None:
    """Input features sorted by the group that they belong to, with -1 behind those of a group that
    ends in the middle of a unit of columns (packed columns,); None where they lie so already."""
    group_of = part.group_of
    if group_of is None:
        return None
    if _unit_of(np.bincount(group_of)) is None:
        return np.maximum(filled_order(group_of), -1)
    if (np.diff(group_of) >= 0).all():
        return None
    return np.argsort(group_of, kind="stable").astype(np.int32)


def packed_cols(part: WeightPart) -> int:
    """Columns that a part of integers takes by itself."""
    order = column_order(part)
    return part.shape[1] if order is None else len(order)


def packed_columns(part: WeightPart, cols: int) -> I32:
    """(cols,) the input feature of each packed column, -1 for none."""
    order = column_order(part)
    if order is None:
        order = np.arange(part.shape[1], dtype=np.int32)
    return np.pad(order, (0, cols - len(order)), constant_values=-1)


def _unit_of(sizes: AnyArray) -> int | None:
    """The widest unit of columns that no group of these sizes ends in the middle of."""
    ends = np.cumsum(sizes)[:-1]
    units = (128, 64, FILLED_UNIT)
    return next((unit for unit in units if not (ends % unit).any()), None)


def _part_kind(part: WeightPart) -> NativeKind | None:
    layout = part.layout
    if layout.gguf_type is not None:
        return NativeKind(layout.gguf_type) if layout.gguf_type in BLOCK_KINDS else None
    if layout.is_mxfp4:
        return NativeKind("MXFP4")
    if layout.has_codes:
        return _affine_kind(part)
    if layout.kind == "fp8" and layout.options.get("dtype", "f8e4m3") == "f8e4m3":
        in_units = layout.options["strategy"] != "block"
        in_units = in_units or int(layout.options["block_cols"]) % FLOAT8_COLS == 0
        return NativeKind(FLOAT8_KIND) if in_units else None
    return None


def _affine_kind(part: WeightPart) -> NativeKind | None:
    """The kind with the widest unit of columns that no group ends in the middle of, or with the
    least where groups are filled up to whole ones and still take less than 16 bits a weight."""
    cols, bits = part.shape[1], 4 if part.layout.bits <= 4 else 8
    if part.layout.bits > 8:
        return None
    group_of = part.group_of
    in_order = group_of is None
    if group_of is None:
        group_of = np.arange(cols) // (part.layout.group_size or cols)
    unit = _unit_of(np.bincount(group_of))
    if unit is None:
        taken = len(filled_order(group_of)) * (bits + _FACTOR_BITS / FILLED_UNIT)
        if in_order or taken >= 16 * cols:
            return None
        unit = FILLED_UNIT
    order = column_order(part)
    return NativeKind(AFFINE_KINDS[bits, unit], b"" if order is None else order.tobytes())
