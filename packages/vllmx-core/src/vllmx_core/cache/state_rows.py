"""Rows of a step and their states as indices, for backends that work rows side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vllmx_core.ops.formulas import states_after
from vllmx_core.plan import StepPlan
from vllmx_core.records import Record

Index = npt.NDArray[np.int64]


class StateRows(Record):
    """The rows of a step, the longest first, so that those with a token at some offset are the
    first ones."""

    lengths: list[int]
    first: Index  # (R,) index of each row's first token
    source: Index  # (R,) slot that it reads, -1 where it begins
    target: Index  # (R,) slot that it leaves
    after: Index  # (T,) slot that keeps the states after each token too, -1: none

    @classmethod
    def of(cls, plan: StepPlan) -> StateRows:
        source, target = plan.state_slots
        lengths = np.diff(plan.query_start)
        order = np.argsort(-lengths, kind="stable")
        first, read, left = (
            array[order].astype(np.int64) for array in (plan.query_start[:-1], source, target)
        )
        return cls(lengths[order].tolist(), first, read, left, states_after(plan).astype(np.int64))

    @property
    def keeping(self) -> Index:
        """(M,) tokens after which states are kept too."""
        return np.flatnonzero(self.after >= 0)

    def tokens(self) -> Iterator[Index]:
        """Yields for each offset in the rows the tokens (n,) of the n rows that have one there."""
        rows = len(self.lengths)
        for offset in range(self.lengths[0]):
            while self.lengths[rows - 1] <= offset:
                rows -= 1
            yield self.first[:rows] + offset


def conv_windows(plan: StepPlan, state_rows: StateRows, kernel: int) -> tuple[Index, Index]:
    """Rows that a convolution reads, (T, K) with each token's own row last, and rows that it keeps,
    (R + M, K - 1): those of `StateRows.target`, then those of `keeping`. They index an array of the
    R * (K - 1) kept taps in the order of `state_rows`, followed by the T tokens."""
    first, lengths, kept = state_rows.first, np.array(state_rows.lengths), kernel - 1
    rows, keeping = np.arange(plan.num_rows), state_rows.keeping
    owner = np.repeat(np.argsort(first), np.diff(plan.query_start))  # (T,)
    ends = np.arange(plan.num_tokens) - first[owner] + 1  # tokens of the row up to this one
    return (
        _places(owner, first, ends[:, None] - kernel + np.arange(kernel), kept),
        _places(
            np.concatenate([rows, owner[keeping]]),
            first,
            np.concatenate([lengths, ends[keeping]])[:, None] - kept + np.arange(kept),
            kept,
        ),
    )


def _places(rows: Index, first: Index, offsets: Index, kept: int) -> Index:
    """The row at each of these offsets (n, k) of the rows (n,); offsets below 0 are taps."""
    tokens = len(first) * kept + first[rows, None] + offsets
    return np.where(offsets >= 0, tokens, rows[:, None] * kept + kept + offsets)
