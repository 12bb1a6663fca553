"""Lines of a weight map, narrowed to one rank's part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from vllmx_core.sharding.plan import Columns, WeightCut
from vllmx_core.sharding.shares import Share
from vllmx_core.weights.map import parts_of
from vllmx_core.weights.part import WeightPart, WeightSource
from vllmx_core.weights.spec import PartSpec, RankShare, WeightSpec


def narrowed(spec: WeightSpec, cut: WeightCut, *, biased: bool) -> WeightSpec:
    """The rank's rows or columns. If columns are cut, only the `biased` rank adds the bias; if rows
    are cut, the bias is cut with them. Whole matrices of a stack keep theirs."""
    if cut.matrices is not None:
        first, end = cut.matrices
        mine = tuple(part for matrix in spec.matrices[first:end] for part in matrix.parts)
        return replace(spec, parts=mine, count=end - first)
    matrices = zip(spec.matrices, cut.orders or [b""] * spec.count, strict=True)
    parts = tuple(
        part for matrix, order in matrices for part in _narrowed(matrix, cut, order, biased=biased)
    )
    cols = spec.cols if cut.cols is None else cut.cols[1] - cut.cols[0]
    return replace(spec, parts=parts, cols=cols)


def _narrowed(matrix: WeightSpec, cut: WeightCut, order: bytes, *, biased: bool) -> list[PartSpec]:
    found, first = [], 0
    for part in matrix.parts:
        rows, first = (first, first + part.rows), first + part.rows
        own = Share(part.rows, ((0, part.rows),))
        if cut.rows is not None:
            own = cut.rows.between(*rows)
            if not own.pieces:
                continue
        pieces = None if cut.rows is None else own.pieces
        numbers = order if cut.rows is None else _repeated(order, part.rows)
        share = RankShare(part.rows, matrix.cols, pieces, cut.cols, numbers)
        bias = part.bias if cut.cols is None or biased else None
        found.append(replace(part, rows=own.width, share=share, bias=bias))
    return found


def _repeated(order: bytes, rows: int) -> bytes:
    """An order of features for runs of them one after the other, `rows` in all."""
    if not order or len(order) == 4 * rows:
        return order
    features = np.frombuffer(order, np.int32)
    starts = np.arange(0, rows, len(features), dtype=np.int32)
    return (starts[:, None] + features).tobytes()


def columns_of(spec: WeightSpec, source: WeightSource) -> Columns:
    """The places where all parts of a weight may be cut along their input features."""
    matrices = [parts_of(one, source) for one in spec.matrices]
    unit = math.lcm(*{part.col_unit for parts in matrices for part in parts})
    orders = [{group_order(part) for part in parts} for parts in matrices]
    if any(len(found) != 1 or not all(found) for found in orders):
        return Columns(unit)
    groups = {part.layout.group_size or 1 for parts in matrices for part in parts}
    return Columns(unit, tuple(order for (order,) in orders), math.lcm(*groups))


def group_order(part: WeightPart) -> bytes:
    """The input features in the order of their groups, int32; empty if they are in order already or
    groups have unequal sizes."""
    groups, cols = part.group_of, part.shape[1]
    if groups is None:
        return b""
    order = np.argsort(groups, kind="stable").astype(np.int32)
    in_order = np.arange(cols) // (part.layout.group_size or cols)
    return order.tobytes() if np.array_equal(groups[order], in_order) else b""
