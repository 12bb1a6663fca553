"""Rows and columns of parts that lie row by row or are integers, picked and put together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import AnyArray
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import RawTensor, WeightPart

Index = npt.NDArray[np.int64]


def taken(part: WeightPart, index: Index) -> WeightPart:
    """Rows of a part of a row-wise layout, as one copy."""
    buffers = {
        key: raw_of(raw, raw.view()[index]) if raw.shape[:1] == part.shape[:1] else raw
        for key, raw in part.buffers.items()
    }
    return replace(part, shape=(len(index), *part.shape[1:]), buffers=buffers, cut=None)


def stacked(pieces: list[WeightPart]) -> WeightPart:
    """Parts of a row-wise layout one below the other, as one copy."""
    if len(pieces) == 1:
        return pieces[0]
    count = sum(piece.shape[0] for piece in pieces)
    first = pieces[0]
    buffers = {}
    for key, raw in first.buffers.items():
        if raw.shape[:1] != first.shape[:1]:  # one for all rows
            buffers[key] = raw
            continue
        data = np.concatenate([piece.buffers[key].data for piece in pieces])
        buffers[key] = replace(raw, shape=(count, *raw.shape[1:]), stored=data)
    return replace(first, shape=(count, *first.shape[1:]), buffers=buffers)


def raw_of(like: RawTensor, values: npt.NDArray[np.generic]) -> RawTensor:
    flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return replace(like, shape=values.shape, stored=flat)


def raw_cols(raw: RawTensor, axis: int, cols: tuple[int, int, int]) -> RawTensor:
    """The entries of a row's buffer that belong to some columns: of whole blocks, codes packed to
    bytes, scales of groups; one for the row stays. Blocks of MXFP4 have an axis for their bytes
    behind their own.

    Args:
        axis: of a row's entries.
        cols: of how many columns, the first that is wanted, and where they end.
    """
    if len(raw.shape) <= axis or raw.shape[axis] == 1:
        return raw
    width, (count, begin, end) = raw.shape[axis], cols
    return raw.cols(begin * width // count, -(-end * width // count), axis)


def stacked_codes(pieces: list[CodedRows]) -> CodedRows:
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return CodedRows(
        np.concatenate([piece.codes for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
        np.concatenate(zeros) if zeros else None,
        first.group_of,
    )


def code_rows(rows: CodedRows, index: Index) -> CodedRows:
    zeros = None if rows.zeros is None else rows.zeros[index]
    return CodedRows(rows.codes[index], rows.scales[index], zeros, rows.group_of)


def code_cols(rows: CodedRows, wanted: slice | Index) -> CodedRows:
    """Some columns, with the groups that they have."""
    cols, groups = rows.codes.shape[1], rows.scales.shape[1]
    group_of = rows.group_of
    if group_of is None:
        group_of = (np.arange(cols) // (cols // groups)).astype(np.int32)
    of_cols = group_of[wanted]
    first, last = int(of_cols.min()), int(of_cols.max()) + 1
    zeros = None if rows.zeros is None else rows.zeros[:, first:last]
    return CodedRows(
        rows.codes[:, wanted],
        rows.scales[:, first:last],
        zeros,
        None if in_equal_groups(of_cols) else of_cols - np.int32(first),
    )


def in_equal_groups(groups: AnyArray) -> bool:
    """Whether columns of these groups are in their order, and as many of each."""
    count = int(groups.max()) - int(groups.min()) + 1
    if len(groups) % count:
        return False
    return np.array_equal(groups - groups.min(), np.arange(len(groups)) // (len(groups) // count))
