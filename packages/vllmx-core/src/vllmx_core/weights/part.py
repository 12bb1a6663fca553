"""Parts of weights, as data: nothing is read before `rows`, `dequantize` or `coded_rows`.

A `Layout` is the encoding of a matrix in buffers, with a subclass for each way of storing weights.
A `StoredPart` is a tensor with its layout; `vllmx_core.weights.views` picks rows and columns of
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32, AnyArray
from vllmx_core.records import Record, field
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import RawTensor

Span = tuple[int, int]
"""Rows or columns [first, end)."""
Index = npt.NDArray[np.int64]
_COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at once."""
_WORDS = 32
"""Integers of any number of bits fill whole 32-bit words at multiples of so many."""


class Layout(Record):
    """The encoding of a matrix in buffers. A subclass names its `kind` and overrides `decode`; also
    `codes` if weights are small integers, and `row_wise` and `cut` if buffers are not stored row by
    row."""

    bits: float
    group_size: int | None = None
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    kind: ClassVar[str] = ""
    has_codes: ClassVar[bool] = False
    """True if `codes` exists; `bits` and `group_size` then describe its integers. If input features
    are not in the order of their groups, the buffer "g_idx" has the group of each."""
    gathers_codes: ClassVar[bool] = False
    """True if `codes` reads scattered rows faster by one index than one by one."""

    @property
    def row_wise(self) -> bool:
        """True if each buffer has an entry for each row, or one for all rows."""
        return True

    @property
    def gguf_type(self) -> str | None:
        """The GGUF block type of the buffer "weight"."""
        return None

    @property
    def is_mxfp4(self) -> bool:
        """True if the buffers are "weight", e2m1 values two to a byte, and "scale", an 8-bit
        exponent for each 32 of them."""
        return False

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        """Returns rows [begin, end) of a (rows, cols) part as float32."""
        raise NotImplementedError

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        """Returns rows of a (rows, cols) part as integers."""
        raise NotImplementedError

    def cut(self, part: StoredPart, rows: Span, cols: Span) -> StoredPart | None:
        """Cuts rows and columns out of the stored buffers, so that nothing else is read; None if
        that would split words or groups."""
        if not self.row_wise:
            return None
        buffers = {
            key: _columns(raw, part.shape[1], cols) for key, raw in part.rows(*rows).buffers.items()
        }
        shape = (rows[1] - rows[0], cols[1] - cols[0])
        return replace(part, shape=shape, layout=self.of_width(shape[1]), buffers=buffers)

    def share(self, part: StoredPart, share: RankShare) -> WeightPart | None:
        """Returns the share of a rank that `cut` cannot take; None: the layout has no such."""
        return None

    def of_width(self, cols: int) -> Layout:
        """Returns the layout of rows of another width; for layouts that are `row_wise`."""
        return self

    def col_unit(self, cols: int, *, shuffled: bool) -> int:
        """Columns can be cut at multiples of this number of input features, which keeps groups and
        blocks whole."""
        group_size = self.group_size or cols
        in_words = shuffled or (self.has_codes and group_size >= cols)
        return min(_WORDS, cols) if in_words else group_size


class WeightPart(Record):
    """One logical tensor: a matrix (rows = output features, cols = input features) or a vector."""

    name: str
    shape: tuple[int, ...]
    layout: Layout

    def rows(self, begin: int, end: int) -> StoredPart:
        """Returns rows [begin, end) with their buffers, for layouts that are `row_wise`. Reads only
        parts that are not stored so."""
        raise NotImplementedError

    def stored(self) -> StoredPart:
        """Returns all rows; see `rows`."""
        return self.rows(0, self.shape[0])

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        """Reads the part, or its rows [begin, end), as float32."""
        return self.rows(begin, self.shape[0] if end is None else end).dequantize()

    def coded_rows(self, begin: int, end: int) -> CodedRows:
        """Reads rows [begin, end) as integers, for layouts with `has_codes`."""
        return self.rows(begin, end).coded_rows(0, end - begin)

    def narrowed(self, rows: Span, cols: Span) -> WeightPart | None:
        """Returns these rows and columns if the rest need not be read; else None."""
        return None

    def entry(self, index: int) -> WeightPart:
        """Returns one entry of the first axis, unread, of a part with more axes."""
        raise NotImplementedError

    def with_buffers(self, change: Callable[[RawTensor], RawTensor]) -> WeightPart:
        """Returns the part with every stored tensor changed."""
        raise NotImplementedError

    @property
    def group_of(self) -> AnyArray | None:
        """(cols,) the group of each input feature, unless they are in the order of groups."""
        return None

    @property
    def is_shuffled(self) -> bool:
        """True if `group_of` is set."""
        return self.group_of is not None

    @property
    def col_unit(self) -> int:
        return self.layout.col_unit(self.shape[-1], shuffled=self.is_shuffled)


class StoredPart(WeightPart):
    """A tensor as it is stored: unread where its buffers are ranges of a file."""

    buffers: Mapping[str, RawTensor]

    def rows(self, begin: int, end: int) -> StoredPart:
        count = self.shape[0]
        buffers = {
            key: raw.rows(begin, end) if raw.shape[:1] == (count,) else raw
            for key, raw in self.buffers.items()
        }
        return replace(self, shape=(end - begin, *self.shape[1:]), buffers=buffers)

    def stored(self) -> StoredPart:
        return self

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        if not self.shape:
            return self.buffers["weight"].to_f32()
        end = self.shape[0] if end is None else end
        if len(self.shape) != 3 or self.layout == DENSE:
            return self.layout.decode(self, begin, end)
        each = self.shape[1]
        values = self._flat().dequantize(begin * each, end * each)
        return values.reshape(end - begin, *self.shape[1:])

    def coded_rows(self, begin: int, end: int) -> CodedRows:
        return self.layout.codes(self, slice(begin, end))

    def narrowed(self, rows: Span, cols: Span) -> WeightPart | None:
        return self.layout.cut(self, rows, cols)

    def entry(self, index: int) -> WeightPart:
        rows = self.shape[1]
        return self._flat().rows(index * rows, (index + 1) * rows)

    def with_buffers(self, change: Callable[[RawTensor], RawTensor]) -> StoredPart:
        return replace(self, buffers={key: change(raw) for key, raw in self.buffers.items()})

    def _flat(self) -> StoredPart:
        """Returns the matrices of a stack below each other."""
        buffers = {
            key: raw.joined_axes() if raw.shape[:2] == self.shape[:2] else raw
            for key, raw in self.buffers.items()
        }
        count, rows, *rest = self.shape
        return replace(self, shape=(count * rows, *rest), buffers=buffers)

    @property
    def group_of(self) -> AnyArray | None:
        return np.asarray(self.buffers["g_idx"].view()) if self.is_shuffled else None

    @property
    def is_shuffled(self) -> bool:
        return bool(self.layout.options.get("act_order")) and "g_idx" in self.buffers


class Dense(Layout):
    """Numbers of one dtype, in a buffer named "weight"."""

    kind: ClassVar[str] = "dense"

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        return part.buffers["weight"].rows(begin, end).to_f32()

    def col_unit(self, cols: int, *, shuffled: bool) -> int:
        return 1


DENSE = Dense(16)


class Integers(Layout):
    """Integers picked of another layout; no buffers that a kernel could take as stored."""

    kind: ClassVar[str] = "integers"
    has_codes: ClassVar[bool] = True

    @property
    def row_wise(self) -> bool:
        return False


def is_plain(part: WeightPart) -> bool:
    """True if a part's numbers are stored unencoded, in one buffer."""
    return isinstance(part, StoredPart) and part.layout == DENSE


def dense_part(name: str, values: F32) -> StoredPart:
    """Returns float32 values as a part."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    raw = RawTensor(name, "f32", values.shape, flat)
    return StoredPart(name, values.shape, DENSE, {"weight": raw})


def are_equal(one: WeightPart, other: WeightPart) -> bool:
    """True if two weights are stored with equal bytes."""
    if not isinstance(one, StoredPart) or not isinstance(other, StoredPart):
        return False
    if (one.layout, one.shape, one.buffers.keys()) != (
        other.layout,
        other.shape,
        other.buffers.keys(),
    ):
        return False
    pairs = [(one.buffers[key], other.buffers[key]) for key in one.buffers]
    if any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in pairs):
        return False
    return all(
        np.array_equal(a.data, b.data)
        for pair in pairs
        for a, b in zip(*(map(_pieces, pair)), strict=True)
    )


def _pieces(tensor: RawTensor) -> Iterator[RawTensor]:
    """The rows of a tensor, a few megabytes at a time."""
    if not tensor.shape:
        yield tensor
        return
    for begin in range(0, tensor.shape[0], _COMPARED_ROWS):
        yield tensor.rows(begin, min(begin + _COMPARED_ROWS, tensor.shape[0]))


def _columns(raw: RawTensor, width: int, cols: Span) -> RawTensor:
    """Returns the entries of each row's buffer that belong to some of `width` columns: whole
    blocks, codes packed to bytes, scales of groups. A single entry for the row stays."""
    if len(raw.shape) < 2 or raw.shape[1] == 1:
        return raw
    entries = raw.shape[1]
    return raw.cols(cols[0] * entries // width, -(-cols[1] * entries // width))


class WeightSource(Protocol):
    """An opened checkpoint. Reading is thread-safe."""

    def names(self) -> Collection[str]:
        """All tensor names."""
        ...

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError, with the nearest names, when `name` is missing."""
        ...

    def close(self) -> None:
        """Closes the files; parts must not be used any more."""
        ...


class SourceOver:
    """A `WeightSource` over another one: what a subclass does not override is that one's."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Collection[str]:
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        return self._source.part(name)

    def close(self) -> None:
        self._source.close()
