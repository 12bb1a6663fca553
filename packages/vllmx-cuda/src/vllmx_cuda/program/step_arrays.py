"""Arrays of a step that few models read: numbers of table rows, ends of texts, segments. A model's
ops say which it has (`arrays_of`); `Staging` makes them on the host and sends them with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from vllmx_core.ops.embedding import Embedding, numbers
from vllmx_core.ops.op import Op
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import IdSource, Rows, TokenIds
from vllmx_core.plan import I32, StepPlan


class StepArray(Protocol):
    """int32, one for each row. Equal ones are one array."""

    rows: ClassVar[Rows]
    padding: ClassVar[int]

    def values(self, plan: StepPlan) -> I32: ...


@dataclass(frozen=True, slots=True)
class TableRows:
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
class FirstTokens:
    """Of each logit row: the first token of its row."""

    rows: ClassVar[Rows] = "L"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        row = np.searchsorted(plan.query_start, plan.logit_rows, side="right") - 1
        return plan.query_start[row]


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """0, 1, ...: the step's tokens as the slots of their own keys."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = -1

    def values(self, plan: StepPlan) -> I32:
        return np.arange(plan.num_tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Places:
    """Of each token: its place in its segment."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        counts = np.diff(plan.query_start)
        return (np.arange(plan.num_tokens) - np.repeat(plan.query_start[:-1], counts)).astype(
            np.int32
        )


@dataclass(frozen=True, slots=True)
class SegmentLengths:
    """Of each token: how many its segment has."""

    rows: ClassVar[Rows] = "T"
    padding: ClassVar[int] = 0

    def values(self, plan: StepPlan) -> I32:
        counts = np.diff(plan.query_start)
        return np.repeat(counts, counts).astype(np.int32)


SEGMENTS: tuple[StepArray, ...] = (TokenNumbers(), Places(), SegmentLengths())
"""What `segment_attention` reads."""


def table_rows(op: Embedding) -> TableRows:
    """Of an embedding of anything but token ids."""
    return TableRows(op.ids.source, op.offset, op.w.rows - 1)


def arrays_of(ops: Sequence[Op]) -> tuple[StepArray, ...]:
    """Those that the kernels of a model's ops read, each once."""
    found: list[StepArray] = []
    for op in ops:
        if isinstance(op, Embedding) and op.ids.source != "tokens":
            found.append(table_rows(op))
        elif isinstance(op, Pool) and op.kind != "last":
            found.append(FirstTokens())
        elif isinstance(op, SegmentAttention):
            found += SEGMENTS
    return tuple(dict.fromkeys(found))
