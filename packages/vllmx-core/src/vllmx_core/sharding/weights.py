"""Lines of a weight map, narrowed to what one rank has."""

from __future__ import annotations

import math
from dataclasses import replace

from vllmx_core.sharding.cuts import Share
from vllmx_core.sharding.plan import WeightCut
from vllmx_core.weight_map import parts_of
from vllmx_core.weights import PartSpec, RankShare, WeightSource, WeightSpec


def narrowed(spec: WeightSpec, cut: WeightCut, *, biased: bool) -> WeightSpec:
    """The rank's rows or columns. A bias behind columns is added by one rank, the one that is
    `biased`; one of rows is cut with them. Whole matrices of a stack keep theirs."""
    if cut.matrices is not None:
        first, end = cut.matrices
        mine = tuple(part for matrix in spec.matrices[first:end] for part in matrix.parts)
        return replace(spec, parts=mine, count=end - first)
    parts = tuple(
        part for matrix in spec.matrices for part in _narrowed(matrix, cut, biased=biased)
    )
    cols = spec.cols if cut.cols is None else cut.cols[1] - cut.cols[0]
    return replace(spec, parts=parts, cols=cols)


def _narrowed(matrix: WeightSpec, cut: WeightCut, *, biased: bool) -> list[PartSpec]:
    found, first = [], 0
    for part in matrix.parts:
        rows, first = (first, first + part.rows), first + part.rows
        own = Share(part.rows, ((0, part.rows),))
        if cut.rows is not None:
            own = cut.rows.between(*rows)
            if not own.pieces:
                continue
        share = RankShare(
            part.rows, matrix.cols, None if cut.rows is None else own.pieces, cut.cols
        )
        bias = part.bias if cut.cols is None or biased else None
        found.append(replace(part, rows=own.width, share=share, bias=bias))
    return found


def col_unit_of(spec: WeightSpec, source: WeightSource) -> int:
    """The number of input features at whose multiples all parts of a weight may be cut."""
    return math.lcm(*{part.col_unit for one in spec.matrices for part in parts_of(one, source)})
