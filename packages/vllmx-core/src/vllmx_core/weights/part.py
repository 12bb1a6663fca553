"""Weights on their way from a file to a backend.

A *weight format* opens files and gives raw tensors, which are read when somebody looks. A
*quantisation* says how several raw tensors make one logical matrix (`QuantLayout`). A *backend*
takes `WeightPart`s: it multiplies the layouts that it knows natively and calls `dequantize` for the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32
from vllmx_core.records import Record, field
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.files import FileRange, ReadingRoom

DType = Literal[
    "f32", "f16", "bf16", "f64", "i64", "i32", "i16", "i8", "u32", "u8", "bool", "f8e4m3", "f8e5m2",
    "f8e8m0",
]  # fmt: skip
ITEM_BYTES: Mapping[str, int] = {
    "f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u32": 4,
    "u8": 1, "bool": 1, "f8e4m3": 1, "f8e5m2": 1, "f8e8m0": 1,
}  # fmt: skip


def bf16_to_f32(words: npt.NDArray[np.uint16]) -> F32:
    """Exact: bfloat16 is the upper half of a float32."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(values)
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def float8_to_f32(codes: npt.NDArray[np.uint8], dtype: str) -> F32:
    """Exact values of f8e4m3 (finite: 0x7f and 0xff are NaN, no infinity), f8e5m2 (the upper half
    of a float16) or f8e8m0 (2 to the power code - 127, 0xff is NaN) codes, in their shape."""
    table: F32 = _FLOAT8[dtype][codes]
    return table


def _float8_tables() -> dict[str, F32]:
    codes = np.arange(256, dtype=np.uint16)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    fraction = np.where(exponent == 0, mantissa, mantissa + 8)
    e4m3 = np.ldexp(fraction.astype(np.float32), np.maximum(exponent, 1).astype(np.int32) - 10)
    e4m3 = np.where(codes & 128, -e4m3, e4m3).astype(np.float32)
    e4m3[[0x7F, 0xFF]] = np.nan
    e8m0 = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    e8m0[0xFF] = np.nan
    e5m2 = (codes << np.uint16(8)).view(np.float16).astype(np.float32)
    return {"f8e4m3": e4m3, "f8e5m2": e5m2, "f8e8m0": e8m0}


# 2 ** 128 at code 0xff is replaced by NaN; ARM calls the signalling NaNs of e5m2 invalid.
with np.errstate(over="ignore", invalid="ignore"):
    _FLOAT8 = _float8_tables()


class RawTensor(Record):
    """One tensor as it lies in the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    stored: npt.NDArray[np.uint8] | FileRange
    """(bytes,) little-endian, row-major: in memory, or where they lie in a file."""

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes if isinstance(self.stored, FileRange) else self.stored.nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """(bytes,) of what lies in a file, they are read at each look."""
        return self.stored.read() if isinstance(self.stored, FileRange) else self.stored

    def in_memory(self, room: ReadingRoom | None = None) -> RawTensor:
        """The same with its bytes read, for who looks at them again and again. Without a room of
        the caller's, who does so for a few rows at a time shares what is read with those who take
        the next ones."""
        if not isinstance(self.stored, FileRange):
            return self
        place = self.stored
        return replace(
            self, stored=place.kept() if room is None else place.read(room.of(place.num_bytes))
        )

    def view(self) -> npt.NDArray[np.generic]:
        """The tensor in its own dtype, `data` without a copy; bf16 as uint16, fp8 as uint8."""
        numpy_dtype = {
            "f32": "<f4",
            "f16": "<f2",
            "bf16": "<u2",
            "f64": "<f8",
            "i64": "<i8",
            "i32": "<i4",
            "i16": "<i2",
            "i8": "i1",
            "u32": "<u4",
            "u8": "u1",
            "bool": "?",
            "f8e4m3": "u1",
            "f8e5m2": "u1",
            "f8e8m0": "u1",
        }[self.dtype]
        return self.data.view(numpy_dtype).reshape(self.shape)

    def rows(self, begin: int, end: int) -> RawTensor:
        """Entries of the first dimension from `begin` to before `end`, not read so far."""
        entry_bytes = self.num_bytes // self.shape[0] if self.shape[0] else 0
        first, last = begin * entry_bytes, end * entry_bytes
        stored = self.stored
        part = stored.cut(first, last) if isinstance(stored, FileRange) else stored[first:last]
        return replace(self, shape=(end - begin, *self.shape[1:]), stored=part)

    def cols(self, begin: int, end: int, axis: int = 1) -> RawTensor:
        """Entries of an axis behind the first from `begin` to before `end`, not read so far."""
        lead, width, *rest = (math.prod(self.shape[:axis]), *self.shape[axis:])
        if (begin, end) == (0, width) or not lead:
            return self
        row_bytes = self.num_bytes // lead
        first, last = (row_bytes // width * place for place in (begin, end))
        shape, stored = (*self.shape[:axis], end - begin, *rest), self.stored
        if isinstance(stored, FileRange):
            return replace(self, shape=shape, stored=stored.columns(row_bytes, first, last))
        part = np.ascontiguousarray(stored.reshape(lead, row_bytes)[:, first:last])
        return replace(self, shape=shape, stored=part.reshape(-1))

    def to_f32(self) -> F32:
        """A float32 array of the same values, `data` itself where that is float32."""
        array = self.view()
        if self.dtype == "bf16":
            return bf16_to_f32(array)  # type: ignore[arg-type]
        if self.dtype in _FLOAT8:
            return float8_to_f32(array, self.dtype)  # type: ignore[arg-type]
        return array.astype(np.float32, copy=False)


class QuantLayout(Record):
    """How the buffers of a part encode its matrix. `DENSE` has one buffer named "weight"."""

    kind: str
    bits: float
    group_size: int | None = None
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


DENSE = QuantLayout("dense", 16)
_WORDS = 32
"""Integers of any number of bits that fill whole words of 32."""


Span = tuple[int, int]
"""Rows or columns from the first to before the second."""


class WeightPart(Record):
    """One logical tensor: a matrix (rows = output features, cols = input features) or a vector."""

    name: str
    shape: tuple[int, ...]
    layout: QuantLayout
    buffers: Mapping[str, RawTensor]
    decode: Callable[[WeightPart, int, int], F32] | None = None
    """decode(part, begin, end) turns these rows of a layout other than `DENSE` into float32; the
    format or quantisation sets it."""
    coded: Callable[[WeightPart, int, int], CodedRows] | None = None
    """coded(part, begin, end) gives these rows as integers; set where the layout's weights are
    such, and its `bits` and `group_size` are those of the integers then. Where input features are
    not in the order of their groups, the buffer "g_idx" has the group of each."""
    cut: Callable[[int, int], WeightPart] | None = None
    """Set by `made_part`: makes these rows of a part that the source does not hold as it is."""
    narrow: Callable[[WeightPart, Span, Span], WeightPart | None] | None = None
    """narrow(part, rows, cols) cuts these out of what is stored, so that nothing else is read or
    made; None where words or groups would be cut in two. Set where buffers do not lie row by row,
    or are made."""
    coded_at: Callable[[WeightPart, npt.NDArray[np.int64]], CodedRows] | None = None
    """coded_at(part, rows) gives rows that lie apart from each other as `coded` gives neighbours;
    set where this is faster than one after the other."""

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        """The part, or its rows from `begin` to before `end`, as float32."""
        if not self.shape:
            return self.buffers["weight"].to_f32()
        end = self.shape[0] if end is None else end
        if self.cut is not None:
            return self.cut(begin, end).dequantize()
        if self.decode is not None:
            return self.decode(self, begin, end)
        return self.buffers["weight"].rows(begin, end).to_f32()

    def coded_rows(self, begin: int, end: int) -> CodedRows:
        """Rows from `begin` to before `end` of a part that has `coded`."""
        assert self.coded is not None, f"{self.layout.kind} has no integers"
        return self.coded(self, begin, end)

    def rows(self, begin: int, end: int) -> WeightPart:
        """Rows from `begin` to before `end` as a part of their own, for layouts whose buffers have
        an entry for each row (or one for all rows): `DENSE`, "gguf", "int8", "fp8" without
        blocks."""
        if self.cut is not None:
            return self.cut(begin, end)
        count = self.shape[0]
        buffers = {
            key: raw.rows(begin, end) if raw.shape[:1] == (count,) else raw
            for key, raw in self.buffers.items()
        }
        return replace(self, shape=(end - begin, *self.shape[1:]), buffers=buffers)

    @property
    def col_unit(self) -> int:
        """`cols` cuts at multiples of so many input features (and at the last one): what shares a
        scale or lies in one block stays together."""
        kind, options = self.layout.kind, self.layout.options
        if kind == "fp8" and options["strategy"] == "block":
            return int(options["block_cols"])
        if kind in ("dense", "int8", "fp8"):  # a scale for each row
            return 1
        group_size, cols = self.layout.group_size or self.shape[-1], self.shape[-1]
        in_words = self.is_shuffled or (self.coded is not None and group_size >= cols)
        return min(_WORDS, cols) if in_words else group_size

    @property
    def is_shuffled(self) -> bool:
        """Whether input features are not in the order of their groups."""
        # the option first: the buffers of a part that is made are made by looking
        return bool(self.layout.options.get("act_order")) and "g_idx" in self.buffers

    def cols(self, begin: int, end: int) -> WeightPart:
        """Input features from `begin` to before `end` as a part of their own, of the same layout
        where its buffers lie row by row, else as integers or as float32. Both ends are multiples
        of `col_unit`, or the end of the matrix."""
        from vllmx_core.weights.picks import cols_of

        return cols_of(self, begin, end)


def made_part(
    name: str,
    shape: tuple[int, ...],
    layout: QuantLayout,
    make: Callable[[int, int], WeightPart],
    *,
    coded: bool = False,
    narrow: Callable[[WeightPart, Span, Span], WeightPart | None] | None = None,
) -> WeightPart:
    """A part whose rows are made when they are asked for: make(begin, end) gives them, of this
    layout, with buffers as `WeightPart.rows` wants them, and with `coded` where this says so.
    `narrow` is the part's. Whoever reads `buffers` has all rows made at once; `rows`, `coded_rows`
    and `dequantize` keep nothing."""

    def made_codes(_: WeightPart, begin: int, end: int) -> CodedRows:
        return make(begin, end).coded_rows(0, end - begin)

    buffers = _MadeBuffers(make, shape[0])
    codes = made_codes if coded else None
    return WeightPart(name, shape, layout, buffers, None, codes, make, narrow)


class _MadeBuffers(Mapping[str, RawTensor]):
    """Made at the first look, then kept as long as the part."""

    def __init__(self, make: Callable[[int, int], WeightPart], rows: int) -> None:
        self._make, self._rows = make, rows
        self._made: Mapping[str, RawTensor] | None = None

    def _buffers(self) -> Mapping[str, RawTensor]:
        if self._made is None:
            self._made = self._make(0, self._rows).buffers
        return self._made

    def __getitem__(self, key: str) -> RawTensor:
        return self._buffers()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers())

    def __len__(self) -> int:
        return len(self._buffers())


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


class RowRuns(Record):
    """Every `stride`-th row from `begin` on, `length` rows at a time: `RowRuns(0, D, 2 * D)` takes
    the first half of each pair of heads, `RowRuns(1, 1, 2)` every other row."""

    begin: int
    length: int
    stride: int

    def index(self, rows: int) -> npt.NDArray[np.int64]:
        """(rows,) rows of the tensor, `rows` being a multiple of `length`."""
        first = self.begin + self.stride * np.arange(rows // self.length)
        return (first[:, None] + np.arange(self.length)).reshape(-1)


class RankShare(Record):
    """What one rank takes of a part, behind all other picks: the sharding of a model sets it."""

    whole_rows: int
    whole_cols: int
    """The columns of the part and of the weight that all ranks have."""
    rows: tuple[tuple[int, int], ...] | None = None
    """(first, end) of each stretch of the part's rows; None: all."""
    cols: tuple[int, int] | None = None
    """(first, end) of the weight's columns; None: all."""
    order: bytes = b""
    """The order, int32, in which `rows` or `cols` number what the part has; empty: its own."""


class PartSpec(Record):
    """A checkpoint tensor, or what is picked of it, that becomes `rows` consecutive rows of a
    logical weight.

    Picks are applied in this order: an entry of the leading axis, the transposed form, rows,
    columns, the picked matrix turned over. `vllmx_core.weights.map.parts_of` applies them for every
    backend.
    """

    name: str
    rows: int
    bias: str | None = None
    """Checkpoint name of the (rows,) bias that belongs to this part; entry and rows are picked of
    it too."""
    alternatives: tuple[str | PartSpec, ...] = ()
    """Other names of the same tensor, or other parts in place of this one, for checkpoints that
    differ; the first that is there."""
    entry: int | None = None
    """The entry of a tensor with one more axis in front, such as the expert of a stack."""
    transposed: bool | None = False
    """Whether the tensor lies as (input features, output features); None: where it does not fit
    otherwise."""
    runs: RowRuns | None = None
    """The rows that are taken; None: all, or those from the first on where the weight has columns
    picked."""
    first_col: int | None = None
    """The first of the weight's columns; None: it has all."""
    turned: bool = False
    """Whether the weight is the transposed form of the rows that `runs` picks, which are as many as
    the weight has columns. Of a quantised tensor they become float32."""
    share: RankShare | None = None
    """This rank's share of a model that several ranks share. `rows` counts the share alone."""


Shard = Literal["none", "column", "row", "vocab", "expert", "head"]
Role = Literal["", "vocabulary", "experts", "heads", "router"]
"""What a weight's rows are, beyond features: "router" for the scores of experts, few rows that
decide much and stay as precise as they are stored."""


class WeightSpec(Record):
    """One line of a model's weight map: logical name, where it comes from, how it may be split.

    kind "linear": a (rows, cols) matrix for `Ops.linear` or `Ops.logits`; "embedding": a
    (rows, cols) table for `Ops.embedding`; "vector": (rows,) float values for norms and sinks;
    "stack": `count` matrices of (rows, cols), such as the experts of a layer.
    A table that is tied to the LM head is named by two specs with the same part; a backend may
    hold it once.
    """

    name: str
    kind: Literal["linear", "embedding", "vector", "stack"]
    parts: tuple[PartSpec, ...]
    """The tensors that make up the weight; for a stack those of its first matrix, then those of the
    second ..."""
    cols: int = 0
    shard: Shard = "none"
    """How tensor parallelism splits it: columns = output features of each part, rows = input
    features followed by an all-reduce, vocab = output features of table and head, expert = whole
    matrices of a stack, head = the rows of whole heads."""
    offset: float = 0.0
    """Added to a vector at load (Gemma stores norm weights minus one)."""
    role: Role = ""
    count: int = 1
    """Matrices of a stack."""
    shape: tuple[int, ...] | None = None
    """The shape of each tensor of a "vector" whose values are more than a row, such as the taps of
    a convolution: (rows,) row-major values all the same. Axes of length 1 in the file are ignored;
    a part with `runs` picks along the first axis, its `rows` being values. For a "linear" whose one
    tensor has more axes: (rows, cols), row-major, just so."""

    @property
    def rows(self) -> int:
        """Rows of the weight, or of each matrix of a stack."""
        return sum(part.rows for part in self.parts) // self.count

    @property
    def matrices(self) -> tuple[WeightSpec, ...]:
        """The matrices of a stack as linears of their own; any other weight itself."""
        if self.kind != "stack":
            return (self,)
        each = len(self.parts) // self.count
        return tuple(
            replace(
                self,
                name=f"{self.name}[{index}]",
                kind="linear",
                count=1,
                parts=self.parts[index * each : (index + 1) * each],
            )
            for index in range(self.count)
        )
