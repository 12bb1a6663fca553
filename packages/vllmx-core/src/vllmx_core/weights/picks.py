"""Parts cut out of other parts: some rows, some columns, an entry of a stack, the transposed form.

Layouts whose buffers lie row by row stay as they are, so that a backend multiplies what it would
have multiplied whole. Others stay integers where they have integers, and become float32 where they
do not. Nothing is read before somebody asks for rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import (
    DENSE,
    QuantLayout,
    RankShare,
    RawTensor,
    Span,
    WeightPart,
    made_part,
)
from vllmx_core.weights.pieces import (
    Index,
    code_cols,
    code_rows,
    in_equal_groups,
    raw_cols,
    raw_of,
    stacked,
    stacked_codes,
    taken,
)

_ROW_WISE = ("dense", "gguf", "int8", "fp4", "mlx")
_MOST_READ = 4
"""Rows lie so close together that those between them are read too, rather than one after the
other: gate and up of gpt-oss take turns."""
_LONG_RUN = 8
"""Rows side by side that are read by themselves, wherever the next ones lie."""


def entry_of(part: WeightPart, entry: int) -> WeightPart:
    """One (rows, cols) matrix, or (rows,) vector, of a part with one more axis in front. Raises
    WeightFormatError where there is no such entry, or no such axis."""
    count = part.shape[0] if part.shape else 0
    if len(part.shape) not in (2, 3) or entry >= count:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, of which entry {entry} is wanted:"
            " config.json and weights do not belong together"
        )
    rows = part.shape[1]
    if part.cut is not None:
        return _made_entry(part, entry)
    flat = replace(
        part,
        shape=(count * rows, *part.shape[2:]),
        buffers={key: _joined_axes(raw, part.shape) for key, raw in part.buffers.items()},
    )
    return rows_of(flat, np.arange(entry * rows, (entry + 1) * rows))


def decoded_entries(part: WeightPart, first: int, last: int) -> F32:
    """(last - first, rows, cols) of a stack, for layouts that decode matrices."""
    return np.stack([entry_of(part, entry).dequantize() for entry in range(first, last)])


def _made_entry(part: WeightPart, entry: int) -> WeightPart:
    """One entry of a stack whose entries are made when they are asked for; the matrix is made once,
    and kept as long as this part of it."""
    whole = part.cut

    @cache
    def made() -> WeightPart:
        assert whole is not None
        one = whole(entry, entry + 1)
        buffers = {key: _joined_axes(raw, one.shape) for key, raw in one.buffers.items()}
        return replace(one, shape=part.shape[1:], buffers=buffers, cut=None)

    return made_part(
        part.name,
        part.shape[1:],
        part.layout,
        lambda begin, end: made().rows(begin, end),
        coded=part.coded is not None,
    )


def _joined_axes(raw: RawTensor, shape: tuple[int, ...]) -> RawTensor:
    """A buffer whose first two axes are those of the part, as if they were one."""
    if raw.shape[:2] != shape[:2]:
        return raw
    return replace(raw, shape=(shape[0] * shape[1], *raw.shape[2:]))


def transposed(part: WeightPart) -> WeightPart:
    """The (cols, rows) matrix of a (rows, cols) part. Raises WeightFormatError for a layout that is
    not plain numbers: blocks and groups run along the columns."""
    if part.layout != DENSE or len(part.shape) != 2:
        raise WeightFormatError(
            f"tensor {part.name!r} is stored as {part.layout.kind} with its axes the other way"
            " round, which no kernel multiplies: convert the checkpoint from its unquantised form"
        )
    whole = part.cut(0, part.shape[0]) if part.cut is not None else part
    raw = whole.buffers["weight"]

    def make(begin: int, end: int) -> WeightPart:
        # rows lie across the whole tensor: what is read is kept for those who take the next ones
        values = np.ascontiguousarray(raw.in_memory().view()[:, begin:end].T)
        buffers = {"weight": raw_of(raw, values)}
        return WeightPart(part.name, values.shape, DENSE, buffers)

    def narrow(_: WeightPart, rows: Span, cols: Span) -> WeightPart:
        mine = raw.rows(*cols).cols(*rows)
        return transposed(WeightPart(part.name, mine.shape, DENSE, {"weight": mine}))

    return made_part(part.name, part.shape[::-1], DENSE, make, narrow=narrow)


def turned(part: WeightPart) -> WeightPart:
    """The (cols, rows) matrix of a small (rows, cols) part of any layout: float32 where that is no
    plain numbers."""
    if part.layout == DENSE and len(part.shape) == 2:
        return transposed(part)

    def make(begin: int, end: int) -> WeightPart:
        values = np.ascontiguousarray(part.dequantize()[:, begin:end].T)
        raw = RawTensor(part.name, "f32", values.shape, values.view(np.uint8).reshape(-1))
        return WeightPart(part.name, values.shape, DENSE, {"weight": raw})

    return made_part(part.name, part.shape[::-1], DENSE, make)


def rows_of(part: WeightPart, index: Index) -> WeightPart:
    """These rows, in this order."""
    pieces = _narrowed(part, index)
    if pieces:
        return pieces[0] if len(pieces) == 1 else _below(part, pieces)
    shape = (len(index), *part.shape[1:])

    def make(begin: int, end: int) -> WeightPart:
        wanted = index[begin:end]
        span = _read_together(wanted)
        if span is None:
            return stacked([part.rows(*run) for run in _runs(wanted)])
        return taken(part.rows(*span), wanted - span[0])

    if _is_row_wise(part):
        return made_part(part.name, shape, part.layout, make, coded=part.coded is not None)

    def decode(_: WeightPart, begin: int, end: int) -> F32:
        wanted = index[begin:end]
        span = _read_together(wanted)
        if span is None:
            return np.concatenate([part.dequantize(*run) for run in _runs(wanted)])
        return part.dequantize(*span)[wanted - span[0]]

    def coded(_: WeightPart, begin: int, end: int) -> CodedRows:
        wanted = index[begin:end]
        if part.coded_at is not None and not _are_long(wanted):
            return part.coded_at(part, wanted)
        span = _read_together(wanted)
        if span is None:
            return stacked_codes([part.coded_rows(*run) for run in _runs(wanted)])
        return code_rows(part.coded_rows(*span), wanted - span[0])

    return _computed(part, shape, decode, coded)


def _read_together(index: Index) -> Span | None:
    """The stretch in which rows lie that are few and close together each; None: they are read run
    by run."""
    lowest, highest = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
    in_order = highest - lowest == len(index) and (np.diff(index) == 1).all()
    dense = highest - lowest <= _MOST_READ * len(index)
    return (lowest, highest) if dense and not in_order and not _are_long(index) else None


def _are_long(index: Index) -> bool:
    """Whether so many rows at a time lie side by side that those between them cost more to read
    than runs of their own."""
    return bool(_LONG_RUN * (1 + np.count_nonzero(np.diff(index) != 1)) <= len(index))


def _narrowed(part: WeightPart, index: Index) -> list[WeightPart]:
    """The parts that these rows are, one below the other, if the layout has such."""
    if part.narrow is None or not _are_long(index):
        return []
    cols = (0, part.shape[1])
    pieces = [part.narrow(part, run, cols) for run in _runs(index)]
    return [piece for piece in pieces if piece] if all(pieces) else []


def _below(part: WeightPart, pieces: Sequence[WeightPart]) -> WeightPart:
    """Rows of `part`, one below the other, as one."""
    ends = np.cumsum([piece.shape[0] for piece in pieces])
    runs = [(int(end) - piece.shape[0], int(end)) for piece, end in zip(pieces, ends, strict=True)]

    def between(begin: int, end: int) -> Iterator[tuple[WeightPart, Span]]:
        for piece, (first, last) in zip(pieces, runs, strict=True):
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield piece, (low - first, high - first)

    def make(begin: int, end: int) -> WeightPart:
        return stacked([piece.rows(*span) for piece, span in between(begin, end)])

    def decode(_: WeightPart, begin: int, end: int) -> F32:
        return np.concatenate([piece.dequantize(*span) for piece, span in between(begin, end)])

    def coded(_: WeightPart, begin: int, end: int) -> CodedRows:
        return stacked_codes([piece.coded_rows(*span) for piece, span in between(begin, end)])

    shape = (runs[-1][1], *part.shape[1:])
    if _is_row_wise(part):
        return made_part(part.name, shape, part.layout, make, coded=part.coded is not None)
    return _computed(part, shape, decode, coded)


def share_of(part: WeightPart, share: RankShare) -> WeightPart:
    """The rows and columns of one rank."""
    order = np.frombuffer(share.order, np.int32).astype(np.int64)
    is_fp8 = part.layout.kind == "fp8" and not _is_row_wise(part) and part.cut is None
    if is_fp8 and not len(order):
        return _share_of_blocks(part, share)
    if share.cols is not None:
        of_share = slice(*share.cols)
        part = part.cols(*share.cols) if not len(order) else _shuffled(part, order[of_share])
    if share.rows is None:
        return part
    index = np.concatenate([np.arange(*run) for run in share.rows])
    return rows_of(part, order[index] if len(order) else index)


def _shuffled(part: WeightPart, index: Index) -> WeightPart:
    """These columns, in this order, of a part that has integers."""

    def decode(_: WeightPart, first: int, last: int) -> F32:
        return part.dequantize(first, last)[:, index]

    def coded(_: WeightPart, first: int, last: int) -> CodedRows:
        return code_cols(part.coded_rows(first, last), index)

    return _computed(part, (part.shape[0], len(index)), decode, coded, index)


def cols_of(part: WeightPart, begin: int, end: int) -> WeightPart:
    """See `WeightPart.cols`."""
    unit, cols = part.col_unit, part.shape[-1]
    assert 0 <= begin < end <= cols, (begin, end, cols)
    assert begin % unit == 0, (begin, unit)
    assert end % unit == 0 or end == cols, (end, unit)
    shape = (*part.shape[:-1], end - begin)
    narrowed = part.narrow and part.narrow(part, (0, part.shape[0]), (begin, end))
    if narrowed:
        return narrowed
    if _is_row_wise(part):
        layout = _of_width(part.layout, end - begin)

        def make(first: int, last: int) -> WeightPart:
            piece = part.rows(first, last)
            buffers = {
                key: raw_cols(raw, len(shape) - 1, (cols, begin, end))
                for key, raw in piece.buffers.items()
            }
            made = (last - first, end - begin)
            return replace(piece, shape=made, layout=layout, buffers=buffers)

        return made_part(part.name, shape, layout, make, coded=part.coded is not None)

    def decode(_: WeightPart, first: int, last: int) -> F32:
        return part.dequantize(first, last)[:, begin:end]

    def coded(_: WeightPart, first: int, last: int) -> CodedRows:
        return code_cols(part.coded_rows(first, last), slice(begin, end))

    return _computed(part, shape, decode, coded, slice(begin, end))


def _share_of_blocks(part: WeightPart, share: RankShare) -> WeightPart:
    """One rank's part of a matrix with a scale for each block. Blocks are less high where rows that
    are taken begin or end within one."""
    layout, (count, cols) = part.layout, part.shape
    runs, (left, right) = share.rows or ((0, count),), share.cols or (0, cols)
    high, wide = int(layout.options["block_rows"]), int(layout.options["block_cols"])
    groups = slice(left // wide, -(-right // wide))

    def of_height(height: int) -> QuantLayout:
        return replace(layout, options={**layout.options, "block_rows": height})

    def make(first: int, last: int) -> WeightPart:
        wanted = _between(runs, first, last)
        height = _height(high, wanted)
        weight, scale = part.buffers["weight"], part.buffers["scale"].in_memory()
        codes = [weight.rows(*run).cols(left, right).view() for run in wanted]
        blocks = np.concatenate([np.arange(*run, height) // high for run in wanted])
        made = {
            "weight": raw_of(weight, np.concatenate(codes)),
            "scale": raw_of(scale, scale.view()[blocks, groups]),
        }
        shape, buffers = (last - first, right - left), {**part.buffers, **made}
        return replace(part, shape=shape, layout=of_height(height), buffers=buffers)

    shape = (sum(end - begin for begin, end in runs), right - left)
    return made_part(part.name, shape, of_height(_height(high, runs)), make)


def _height(high: int, runs: Sequence[tuple[int, int]]) -> int:
    """The greatest height of blocks at which blocks of `high` rows can be cut into these runs."""
    return math.gcd(high, *(begin for begin, _ in runs), *(end for _, end in runs[:-1]))


def _between(runs: Sequence[tuple[int, int]], first: int, last: int) -> Sequence[tuple[int, int]]:
    """What lies in these runs, one behind the other, from `first` to before `last`."""
    found, at = [], 0
    for begin, end in runs:
        low, most = max(first, at), min(last, at + end - begin)
        if low < most:
            found.append((begin + low - at, begin + most - at))
        at += end - begin
    return found


def any_cols_of(part: WeightPart, begin: int, end: int) -> WeightPart:
    """Does what `cols_of` does, wherever the columns begin and end: float32 where they cut a block
    or a group in two."""
    unit = part.col_unit
    if begin % unit == 0 and (end % unit == 0 or end == part.shape[-1]):
        return part.cols(begin, end)

    def make(first: int, last: int) -> WeightPart:
        values = np.ascontiguousarray(part.dequantize(first, last)[:, begin:end])
        raw = RawTensor(part.name, "f32", values.shape, values.view(np.uint8).reshape(-1))
        return WeightPart(part.name, values.shape, DENSE, {"weight": raw})

    return made_part(part.name, (part.shape[0], end - begin), DENSE, make)


def _is_row_wise(part: WeightPart) -> bool:
    layout = part.layout
    return layout.kind in _ROW_WISE or (
        layout.kind == "fp8" and layout.options["strategy"] != "block"
    )


def _runs(index: Index) -> Iterator[tuple[int, int]]:
    """(first, last) of each stretch of neighbours."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    for run in np.split(index, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _of_width(layout: QuantLayout, cols: int) -> QuantLayout:
    """The layout with groups and blocks of a whole row as wide as the row is now."""
    if layout.kind == "int8":
        return replace(layout, group_size=cols)
    if layout.kind == "fp8":
        return replace(layout, options={**layout.options, "block_cols": cols})
    return layout


def _computed(
    part: WeightPart,
    shape: tuple[int, ...],
    decode: Callable[[WeightPart, int, int], F32],
    coded: Callable[[WeightPart, int, int], CodedRows],
    cols: slice | Index = slice(None),
) -> WeightPart:
    """A part of integers if the layout has such, else of floats; with no buffers that a kernel
    could take as they are stored."""
    if part.coded is None:

        def make(begin: int, end: int) -> WeightPart:
            values = np.ascontiguousarray(decode(part, begin, end))
            raw = RawTensor(part.name, "f32", values.shape, values.view(np.uint8).reshape(-1))
            return WeightPart(part.name, values.shape, DENSE, {"weight": raw})

        return made_part(part.name, shape, DENSE, make)
    options, buffers, group_size = {}, {}, part.layout.group_size
    if part.is_shuffled:
        groups = np.asarray(part.buffers["g_idx"].view())[cols]
        if in_equal_groups(groups):
            group_size = len(groups) // len(set(groups.tolist()))
        else:
            buffers["g_idx"] = raw_of(part.buffers["g_idx"], groups)
            options["act_order"] = True
    layout = QuantLayout("integers", part.layout.bits, group_size, options)
    return WeightPart(part.name, shape, layout, buffers, decode, coded)
