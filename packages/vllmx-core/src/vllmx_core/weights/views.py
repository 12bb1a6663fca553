"""Parts made of other parts: rows, columns, transposes, and concatenated rows.

Views compose as data; reading them resolves the indices. Row-wise layouts are kept, so that a
backend multiplies a slice with the kernels of the whole. Others become integers if they have codes,
otherwise float32. Slices of stored tensors become ranges of the file if the layout allows it
(`Layout.cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.coded import CodedRows, in_equal_groups
from vllmx_core.weights.part import (
    DENSE,
    Index,
    Integers,
    Layout,
    Span,
    StoredPart,
    WeightPart,
    dense_part,
)
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import RawTensor

_MOST_READ = 4
"""Rows this close together are read with those between them: gpt-oss interleaves gate and up."""
_LONG_RUN = 8
"""Runs of at least so many neighbours are read one by one, whatever the gaps."""
Piece = TypeVar("Piece", StoredPart, F32, CodedRows)


# --- views ----------------------------------------------------------------------------------------
class View(WeightPart):
    """A part that is read from others. Subclasses with a row-wise layout override `stored_rows`;
    the others are read as `floats` and, if they have integers, as `integers`."""

    parts: tuple[WeightPart, ...]
    groups: AnyArray | None = None
    """See `group_of`."""

    @property
    def of(self) -> WeightPart:
        """The only part, or the first."""
        return self.parts[0]

    @property
    def group_of(self) -> AnyArray | None:
        return self.groups

    @property
    def keeps_layout(self) -> bool:
        """True if rows have the buffers of `of`."""
        return self.of.layout.row_wise and self.of.layout.kind == self.layout.kind

    def stored_rows(self, begin: int, end: int) -> StoredPart:
        raise NotImplementedError

    def floats(self, begin: int, end: int) -> F32:
        raise NotImplementedError

    def integers(self, begin: int, end: int) -> CodedRows:
        raise NotImplementedError

    def rows(self, begin: int, end: int) -> StoredPart:
        if self.keeps_layout:
            return self.stored_rows(begin, end)
        assert self.layout == DENSE, f"{self.name} has no rows of {self.layout.kind}"
        return dense_part(self.name, self.floats(begin, end))

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        end = self.shape[0] if end is None else end
        if self.keeps_layout:
            return self.stored_rows(begin, end).dequantize()
        return self.floats(begin, end)

    def coded_rows(self, begin: int, end: int) -> CodedRows:
        if self.keeps_layout:
            return self.stored_rows(begin, end).coded_rows(0, end - begin)
        return self.integers(begin, end)

    def with_buffers(self, change: Callable[[RawTensor], RawTensor]) -> WeightPart:
        return replace(self, parts=tuple(part.with_buffers(change) for part in self.parts))


class RowsOf(View):
    """Rows by number."""

    index: Index = np.empty(0, np.int64)

    def stored_rows(self, begin: int, end: int) -> StoredPart:
        return self._read(self.of.rows, _joined, _taken, begin, end)

    def floats(self, begin: int, end: int) -> F32:
        def take(rows: F32, index: Index) -> F32:
            return rows[index]

        return self._read(self.of.dequantize, np.concatenate, take, begin, end)

    def integers(self, begin: int, end: int) -> CodedRows:
        wanted, of = self.index[begin:end], self.of
        if isinstance(of, StoredPart) and of.layout.gathers_codes and not _are_long(wanted):
            return of.layout.codes(of, wanted)
        return self._read(of.coded_rows, CodedRows.joined, CodedRows.at, begin, end)

    def _read(
        self,
        read: Callable[[int, int], Piece],
        join: Callable[[list[Piece]], Piece],
        take: Callable[[Piece, Index], Piece],
        begin: int,
        end: int,
    ) -> Piece:
        """Reads scattered rows run by run, and close ones together with those between them."""
        wanted = self.index[begin:end]
        span = _read_together(wanted)
        if span is None:
            return join([read(*run) for run in _runs(wanted)])
        return take(read(*span), wanted - span[0])


class ColsOf(View):
    """Columns: a span, or columns by number."""

    columns: slice | Index = slice(None)

    def stored_rows(self, begin: int, end: int) -> StoredPart:
        piece = self.of.rows(begin, end)
        if isinstance(self.columns, slice):
            cut = piece.narrowed((0, end - begin), (self.columns.start, self.columns.stop))
            assert isinstance(cut, StoredPart), self.layout
            return cut
        raw = piece.buffers["weight"]
        return replace(
            piece,
            shape=(end - begin, *self.shape[1:]),
            buffers={"weight": raw.with_values(raw.view()[:, self.columns])},
        )

    def floats(self, begin: int, end: int) -> F32:
        return self.of.dequantize(begin, end)[:, self.columns]

    def integers(self, begin: int, end: int) -> CodedRows:
        return self.of.coded_rows(begin, end).cols(self.columns)


class Below(View):
    """Parts below each other."""

    @property
    def keeps_layout(self) -> bool:
        return self.layout.row_wise and all(part.layout == self.layout for part in self.parts)

    def stored_rows(self, begin: int, end: int) -> StoredPart:
        return _joined([part.rows(*span) for part, span in self._between(begin, end)])

    def floats(self, begin: int, end: int) -> F32:
        return np.concatenate([part.dequantize(*span) for part, span in self._between(begin, end)])

    def integers(self, begin: int, end: int) -> CodedRows:
        return CodedRows.joined([p.coded_rows(*span) for p, span in self._between(begin, end)])

    def _between(self, begin: int, end: int) -> Iterator[tuple[WeightPart, Span]]:
        first = 0
        for part in self.parts:
            last = first + part.shape[0]
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield part, (low - first, high - first)
            first = last


class Transposed(View):
    """The transpose of a dense matrix."""

    def stored_rows(self, begin: int, end: int) -> StoredPart:
        # Rows lie across the whole tensor: its bytes are kept for whoever reads the next ones.
        raw = self.of.stored().buffers["weight"].in_memory()
        turned = raw.with_values(raw.view()[:, begin:end].T)
        return StoredPart(self.name, turned.shape, DENSE, {"weight": turned})

    def narrowed(self, rows: Span, cols: Span) -> WeightPart | None:
        found = self.of.narrowed(cols, rows)
        return None if found is None else transposed(found)


class Turned(View):
    """The transpose of a small matrix of any layout, as float32."""

    @property
    def keeps_layout(self) -> bool:
        return False

    def floats(self, begin: int, end: int) -> F32:
        return np.ascontiguousarray(self.of.dequantize()[:, begin:end].T)


class Floats(View):
    """A part of any layout whose rows are read as float32."""

    @property
    def keeps_layout(self) -> bool:
        return False

    def floats(self, begin: int, end: int) -> F32:
        return self.of.dequantize(begin, end)


class Reshaped(View):
    """A tensor in another shape, as float32."""

    @property
    def keeps_layout(self) -> bool:
        return False

    def floats(self, begin: int, end: int) -> F32:
        return self.of.dequantize().reshape(self.shape)[begin:end]


class Permuted(View):
    """A tensor of the shape `whole` with its axes in another order, as a float32 matrix."""

    whole: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    @property
    def keeps_layout(self) -> bool:
        return False

    def floats(self, begin: int, end: int) -> F32:
        values = self.of.dequantize().reshape(self.whole).transpose(self.axes)
        return np.ascontiguousarray(values.reshape(self.shape)[begin:end])


# --- picks ----------------------------------------------------------------------------------------
def entry_of(part: WeightPart, entry: int) -> WeightPart:
    """Returns one (rows, cols) matrix, or (rows,) vector, of a part with one more axis in front.
    Raises WeightFormatError where there is no such entry or axis."""
    if len(part.shape) not in (2, 3) or entry >= part.shape[0]:
        raise WeightFormatError(
            f"tensor {part.name!r} has shape {list(part.shape)}, of which entry {entry} is wanted:"
            " config.json and weights do not belong together"
        )
    return part.entry(entry)


def transposed(part: WeightPart) -> WeightPart:
    """Returns the (cols, rows) matrix of a (rows, cols) part. Raises WeightFormatError for a layout
    other than `DENSE`: blocks and groups run along the columns."""
    if part.layout != DENSE or len(part.shape) != 2:
        raise WeightFormatError(
            f"tensor {part.name!r} is stored as {part.layout.kind} with its axes the other way"
            " round, which no kernel multiplies: convert the checkpoint from its unquantised form"
        )
    return Transposed(part.name, part.shape[::-1], DENSE, (part,))


def turned(part: WeightPart) -> WeightPart:
    """Returns the transpose of a small part of any layout, as float32 unless it is dense."""
    if part.layout == DENSE and len(part.shape) == 2:
        return transposed(part)
    return Turned(part.name, part.shape[::-1], DENSE, (part,))


def rows_of(part: WeightPart, index: Index) -> WeightPart:
    """Returns these rows in this order."""
    if _are_long(index) and len(part.shape) == 2:
        cut = [part.narrowed(run, (0, part.shape[1])) for run in _runs(index)]
        pieces = [piece for piece in cut if piece is not None]
        if len(pieces) == len(cut):
            return pieces[0] if len(pieces) == 1 else below(part.name, pieces)
    layout, groups = _layout_of(part)
    return RowsOf(part.name, (len(index), *part.shape[1:]), layout, (part,), groups, index)


def below(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """Returns parts of equal width below each other; float32 where their layouts differ."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    layout, groups = _layout_of(parts[0])
    if any(_stored_as(part) != _stored_as(parts[0]) for part in parts):
        return Below(name, shape, DENSE, tuple(dense_of(part) for part in parts))
    return Below(name, shape, layout, tuple(parts), groups)


def dense_of(part: WeightPart) -> WeightPart:
    """Returns a part whose rows are read as float32."""
    return Floats(part.name, part.shape, DENSE, (part,))


def cols_of(part: WeightPart, begin: int, end: int) -> WeightPart:
    """Returns input features [begin, end): of the same layout where that is row-wise, else as
    integers or float32. Both ends are multiples of `col_unit`, or the end of the matrix."""
    unit, cols = part.col_unit, part.shape[-1]
    assert 0 <= begin < end <= cols, (begin, end, cols)
    assert begin % unit == 0, (begin, unit)
    assert end % unit == 0 or end == cols, (end, unit)
    narrowed = part.narrowed((0, part.shape[0]), (begin, end))
    return narrowed or _columns_of(part, slice(begin, end), end - begin)


def any_cols_of(part: WeightPart, begin: int, end: int) -> WeightPart:
    """Returns columns as `cols_of` does; float32 where they cut a block or group in two."""
    unit = part.col_unit
    if begin % unit == 0 and (end % unit == 0 or end == part.shape[-1]):
        return cols_of(part, begin, end)
    return _columns_of(dense_of(part), slice(begin, end), end - begin)


def columns_at(part: WeightPart, index: Index) -> WeightPart:
    """Returns columns in the order of an index: float32 unless the part is dense or packed
    integers."""
    if part.layout.row_wise and part.layout != DENSE:
        part = dense_of(part)
    return _columns_of(part, index, len(index))


def _columns_of(part: WeightPart, columns: slice | Index, count: int) -> WeightPart:
    layout, groups = _layout_of(part, columns)
    if layout.row_wise:
        layout = layout.of_width(count)
    return ColsOf(part.name, (*part.shape[:-1], count), layout, (part,), groups, columns)


def share_of(part: WeightPart, share: RankShare) -> WeightPart:
    """Returns the rows and columns of one rank."""
    order = np.frombuffer(share.order, np.int32).astype(np.int64)
    if isinstance(part, StoredPart) and not len(order):
        found = part.layout.share(part, share)
        if found is not None:
            return found
    if share.cols is not None and len(order):
        part = columns_at(part, order[slice(*share.cols)])
    elif share.cols is not None:
        part = cols_of(part, *share.cols)
    if share.rows is None:
        return part
    index = np.concatenate([np.arange(*run) for run in share.rows])
    return rows_of(part, order[index] if len(order) else index)


# --- rows and their layouts -----------------------------------------------------------------------
def _layout_of(
    part: WeightPart, cols: slice | Index = slice(None)
) -> tuple[Layout, AnyArray | None]:
    """Returns the layout of picks of a part (its own if it is row-wise, otherwise integers if it
    has codes, otherwise floats), and the groups of its columns if they are not in order."""
    layout = part.layout
    if layout.row_wise:
        return layout, None
    if not layout.has_codes:
        return DENSE, None
    groups = part.group_of
    if groups is None:
        return Integers(layout.bits, layout.group_size), None
    groups = groups[cols]
    if in_equal_groups(groups):
        return Integers(layout.bits, len(groups) // len(set(groups.tolist()))), None
    return Integers(layout.bits, layout.group_size, {"act_order": True}), groups


def _stored_as(part: WeightPart) -> tuple[Layout, str]:
    """A key that is equal for parts whose stored rows can be concatenated."""
    weight = part.buffers.get("weight") if isinstance(part, StoredPart) else None
    return part.layout, "" if weight is None else weight.dtype


def _runs(index: Index) -> Iterator[Span]:
    """Yields each run of neighbours."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    for run in np.split(index, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _are_long(index: Index) -> bool:
    """True if runs are so long that reading the rows between them costs more than single reads."""
    return bool(_LONG_RUN * (1 + np.count_nonzero(np.diff(index) != 1)) <= len(index))


def _read_together(index: Index) -> Span | None:
    """Returns the span of rows that are few and close together; None: they are read run by run."""
    lowest, highest = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
    in_order = highest - lowest == len(index) and (np.diff(index) == 1).all()
    dense = highest - lowest <= _MOST_READ * len(index)
    return (lowest, highest) if dense and not in_order and not _are_long(index) else None


def _taken(part: StoredPart, index: Index) -> StoredPart:
    """Copies rows of a row-wise layout."""
    buffers = {
        key: raw.with_values(raw.view()[index]) if raw.shape[:1] == part.shape[:1] else raw
        for key, raw in part.buffers.items()
    }
    return replace(part, shape=(len(index), *part.shape[1:]), buffers=buffers)


def _joined(pieces: Sequence[StoredPart]) -> StoredPart:
    """Copies parts of a row-wise layout below each other."""
    if len(pieces) == 1:
        return pieces[0]
    count, first = sum(piece.shape[0] for piece in pieces), pieces[0]
    buffers = {}
    for key, raw in first.buffers.items():
        if raw.shape[:1] != first.shape[:1]:  # one for all rows
            buffers[key] = raw
            continue
        data = np.concatenate([piece.buffers[key].data for piece in pieces])
        buffers[key] = replace(raw, shape=(count, *raw.shape[1:]), stored=data)
    return replace(first, shape=(count, *first.shape[1:]), buffers=buffers)
