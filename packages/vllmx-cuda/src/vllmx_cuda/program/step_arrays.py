"""Arrays of a step that few models read: table rows, ends of texts, segments, images. `arrays_of`
lists those of a model's ops; `Staging` builds them on the host and sends them with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.formulas import numbers
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.op import Op
from vllmx_core.ops.patches import Patches, patches_in
from vllmx_core.ops.place import Place
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.tap import Tap
from vllmx_core.ops.values import IdSource, Rows, TokenIds
from vllmx_core.plan import I32, AnyArray, StepPlan

if TYPE_CHECKING:
    pass

Segments = Literal["rows", "windows"]
"""The bounds of attention without pages: rows of the step, or windows of images."""


class StepArray(Protocol):
    """Words of 32 bits, of each row as many as `columns` says. Equal ones are one array."""

    rows: ClassVar[Rows]
    padding: ClassVar[int]

    def columns(self, sizes: StepSizes) -> int: ...

    def values(self, plan: StepPlan) -> I32:
        """The plan's values of this array, flat."""
        ...


class OneColumn:
    """A `StepArray` with a word for each row."""

    __slots__ = ()

    def columns(self, sizes: StepSizes) -> int:
        return 1


_NO_ROWS = np.zeros(0, np.int32)
"""Padding alone."""


@dataclass(frozen=True, slots=True)
class TableRows(OneColumn):
    """Rows of a table of positions or token types."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    source: IdSource
    offset: int
    last: int
    """Row of the table that stands for all token types beyond it."""

    def values(self, plan: StepPlan) -> I32:
        found = numbers(plan, TokenIds(self.source))
        types = self.source == "token_types"
        return np.minimum(found, self.last) if types else found + np.int32(self.offset)


@dataclass(frozen=True, slots=True)
class FirstTokens(OneColumn):
    """The first token of the row of each logit row."""

    rows: ClassVar[Rows] = "L"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        row = np.searchsorted(plan.query_start, plan.logit_rows, side="right") - 1
        return plan.query_start[row]


@dataclass(frozen=True, slots=True)
class TokenNumbers(OneColumn):
    """0, 1, ...: the step's tokens as the slots of their own keys."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = -1

    def values(self, plan: StepPlan) -> I32:
        return np.arange(plan.num_tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Places(OneColumn):
    """The place of each token in its segment."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    segments: Segments = "rows"

    def values(self, plan: StepPlan) -> I32:
        starts = segment_starts(plan, self.segments)
        before = np.repeat(starts[:-1], np.diff(starts))
        return (np.arange(plan.num_tokens) - before).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SegmentLengths(OneColumn):
    """The number of tokens in the segment of each token."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    segments: Segments = "rows"

    def values(self, plan: StepPlan) -> I32:
        counts = np.diff(segment_starts(plan, self.segments))
        return np.repeat(counts, counts).astype(np.int32)


def segment_arrays(segments: Segments) -> tuple[StepArray, ...]:
    """The arrays that `segment_attention` reads."""
    return TokenNumbers(), Places(segments), SegmentLengths(segments)


def segment_starts(plan: StepPlan, segments: Segments | None) -> I32:
    """The first token of each segment, then T."""
    if segments != "windows":
        return plan.query_start
    windows = patches_in(plan).windows
    assert windows is not None, "`Encoder.places` says where windows are"
    return windows


@dataclass(frozen=True, slots=True)
class TurnedRows(OneColumn):
    """0, 1, ...: rows of what `turn` wrote for each token."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        return np.arange(plan.num_tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """The position of each token on each axis."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    axes: int

    def columns(self, sizes: StepSizes) -> int:
        """A column for each axis."""
        return self.axes

    def values(self, plan: StepPlan) -> I32:
        if plan.rope_positions is None:
            return np.repeat(plan.positions, self.axes)
        return np.ascontiguousarray(plan.rope_positions[: self.axes].T).reshape(-1)


@dataclass(frozen=True, slots=True)
class LastSeen(OneColumn):
    """The last position that each token sees."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        return plan.positions if plan.visible_to is None else plan.visible_to


@dataclass(frozen=True, slots=True)
class FeatureRows(OneColumn):
    """The row of the store of features that stands for each token; `own`: of a drafter's parts."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = -1
    own: bool

    def values(self, plan: StepPlan) -> I32:
        found = plan.own_rows if self.own else plan.feature_rows
        return _NO_ROWS if found is None else found


@dataclass(frozen=True, slots=True)
class TapRows(OneColumn):
    """The row of the store of features that each token's hidden states go to."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = -1

    def values(self, plan: StepPlan) -> I32:
        return _NO_ROWS if plan.tap_rows is None else plan.tap_rows


@dataclass(frozen=True, slots=True)
class PatchValues:
    """The normalised pixels of each patch, float32."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    width: int

    def columns(self, sizes: StepSizes) -> int:
        """A column for each pixel and colour."""
        return self.width

    def values(self, plan: StepPlan) -> I32:
        return _words(patches_in(plan).values)


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The rows of the table of positions for each patch, or how much of each it takes, float32."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0
    weights: bool

    def columns(self, sizes: StepSizes) -> int:
        """A column for each row of the table."""
        return sizes.taps

    def values(self, plan: StepPlan) -> I32:
        found = patches_in(plan)
        return _words(found.table_weights if self.weights else found.table_rows)


@dataclass(frozen=True, slots=True)
class KeptRows(OneColumn):
    """The row of the store that each feature becomes."""

    rows: ClassVar[Rows] = "L"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        return patches_in(plan).keep


@dataclass(frozen=True, slots=True)
class Neighbours(OneColumn):
    """The first or the last of the `count` patches that each feature is the mean of."""

    rows: ClassVar[Rows] = "L"
    padding: ClassVar[int] = 0
    count: int
    last: bool

    def values(self, plan: StepPlan) -> I32:
        first = np.arange(0, plan.num_tokens, self.count, dtype=np.int32)
        return first + np.int32(self.count - 1) if self.last else first


def _words(values: AnyArray) -> I32:
    return np.ascontiguousarray(values).view(np.int32).reshape(-1)


def table_rows(op: Embedding) -> TableRows:
    """The rows of the table of an embedding of anything but token ids."""
    return TableRows(op.ids.source, op.offset, op.w.rows - 1)


def segments_of_op(op: SegmentAttention) -> Segments:
    """The segments that an op keeps within."""
    return "windows" if op.spec.windowed else "rows"


def axis_positions(axes: Sequence[int]) -> AxisPositions:
    """The array that a rotation with these axes reads."""
    return AxisPositions(max(axes) + 1)


def arrays_of(ops: Sequence[Op]) -> tuple[StepArray, ...]:
    """Arrays that the kernels of a model's ops read, each once."""
    return tuple(dict.fromkeys(array for op in ops for array in _arrays(op)))


def _arrays(op: Op) -> tuple[StepArray, ...]:
    if isinstance(op, Embedding):
        return () if op.ids.source == "tokens" else (table_rows(op),)
    if isinstance(op, Pool):
        return () if op.kind == "last" else (FirstTokens(),)
    if isinstance(op, Attention):
        return (*((LastSeen(),) if op.spec.spans else ()), *_turns(op))
    if isinstance(op, SegmentAttention):
        return (*segment_arrays(segments_of_op(op)), *_turns(op))
    if isinstance(op, Place):
        return (FeatureRows(op.own),)
    if isinstance(op, Tap):
        return (TapRows(),)
    if isinstance(op, Patches):
        return (PatchValues(op.out.width),)
    if isinstance(op, Mix):
        return MixedRows(weights=False), MixedRows(weights=True)
    if isinstance(op, Merge):
        ends = Neighbours(op.count, last=False), Neighbours(op.count, last=True)
        return ends if op.kind == "mean" else ()
    return (KeptRows(),) if isinstance(op, Keep) else ()


def _turns(op: Attention | SegmentAttention) -> tuple[StepArray, ...]:
    axes = op.spec.rope_axes
    return (axis_positions(axes), TurnedRows()) if axes else ()


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step with its padding."""

    tokens: int
    logit_rows: int
    rows: int
    items: int
    """Work items of each visibility; 0: none is launched."""
    tiles: tuple[int, ...]
    """Tiles of each kind of tile."""
    groups: int = 1
    """Cache groups, each with slots and a block table of its own."""
    has_states: bool = False
    """True if rows keep states of recurrent layers."""
    taps: int = 0
    """Rows of the table of positions that each patch of a tower mixes."""

    def of(self, rows: Rows) -> int:
        """Rows of a value."""
        return self.tokens if rows == "T" else self.logit_rows

    def words(self, array: StepArray) -> int:
        """Values of an array."""
        return self.of(array.rows) * array.columns(self)

    @property
    def patches(self) -> int:
        """Entries of the block tables that the step can change: in a step of decode rows each takes
        a new block of each group at most."""
        return 2 * self.rows * self.groups + 64
