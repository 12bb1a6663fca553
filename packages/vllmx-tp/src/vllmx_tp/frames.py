"""Steps as flat arrays: how plans and sampling rows lie in the ring.

A frame is int32 words: how many arrays there are, for each its number of axes (-1: absent) and two
lengths, then the arrays one after the other, those of eight bytes first. Nothing is pickled; the
reader gets views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import (
    I32,
    AnyArray,
    LogitEdits,
    PatchRows,
    SamplingRows,
    StepPlan,
    TokenCounts,
)

_PLAN = (
    "tokens",
    "positions",
    "query_start",
    "context_len",
    "logit_rows",
    "state_from",
    "state_to",
    "token_types",
    "rope_positions",
    "feature_rows",
)
_PATCHES = ("values", "table_rows", "table_weights", "keep")
_FLOAT_PATCHES = ("values", "table_weights")
_ROWS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "position",
    "target",
    "num_logprobs",
    "mask_index",
    "masks",
    "whole",
)
_FLOAT_ROWS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
)

Arrays = list[AnyArray | None]


class Frame:
    """A step on its way: of a plan, of sampling rows, or of both.

    Attributes:
        num_words: that `write` fills.
    """

    def __init__(self, plan: StepPlan | None, rows: SamplingRows | None) -> None:
        arrays: Arrays = [] if rows is None else _row_arrays(rows)
        facts = [-1, 0] if rows is None else [rows.max_logprobs, int(rows.all_greedy)]
        groups = 0
        if plan is not None:
            arrays += _plan_arrays(plan)
            groups = len(plan.slots)
        head = [len(arrays), int(plan is not None), int(rows is not None), groups, *facts]
        self._flat: list[I32] = []
        for array in arrays:
            if array is None:
                head += (-1, 0, 0)
                continue
            head += (array.ndim, array.shape[0], array.shape[1] if array.ndim == 2 else 1)
            self._flat.append(array.reshape(-1).view(np.int32))
        head += [0] * (len(head) & 1)  # what follows may have eight bytes
        self._flat.insert(0, np.array(head, np.int32))
        self.num_words = sum(map(len, self._flat))

    def write(self, words: I32) -> None:
        """Into the first `num_words`."""
        np.concatenate(self._flat, out=words[: self.num_words])

    def to_bytes(self) -> bytes:
        """The same for who has no ring."""
        return np.concatenate(self._flat).tobytes()


def _row_arrays(rows: SamplingRows) -> Arrays:
    edits, counts = rows.edits, rows.counts
    found: Arrays = [rows.seed]
    found += [getattr(rows, name) for name in _ROWS]
    found += (None,) * 3 if edits is None else (edits.start, edits.ids, edits.values)
    if counts is None:
        found += (None,) * 4
    else:
        pending = counts.pending.astype(np.int32)
        found += (counts.start, counts.ids, counts.output_counts, pending)
    return found


def _plan_arrays(plan: StepPlan) -> Arrays:
    found: Arrays = [getattr(plan, name) for name in _PLAN]
    patches = plan.patches
    found += [None if patches is None else getattr(patches, name) for name in _PATCHES]
    return [*found, *plan.slots, *plan.block_tables]


def read_frame(words: I32) -> tuple[StepPlan | None, SamplingRows | None]:
    """Views of what a frame holds."""
    count, has_plan, has_rows, groups, max_logprobs, all_greedy = words[:6].tolist()
    shapes = words[6 : 6 + 3 * count].reshape(count, 3).tolist()
    at = 6 + 3 * count
    arrays = _arrays(words, at + (at & 1), shapes, wide=bool(has_rows))
    rows = _rows(arrays, max_logprobs, bool(all_greedy)) if has_rows else None
    plan = _plan(arrays, groups) if has_plan else None
    return plan, rows


def _arrays(
    words: I32, at: int, shapes: Sequence[Sequence[int]], *, wide: bool
) -> Iterator[AnyArray | None]:
    """One after the other; the first has eight bytes an entry where `wide`."""
    for axes, first, second in shapes:
        if axes < 0:
            yield None
            continue
        size = first * second * (1 + wide)
        part = words[at : at + size]
        at += size
        if wide:
            yield part.view(np.uint64)
            wide = False
        else:
            yield part if axes == 1 else part.reshape(first, second)


def _rows(arrays: Iterator[AnyArray | None], max_logprobs: int, all_greedy: bool) -> SamplingRows:
    found = {"seed": next(arrays)}
    for name in _ROWS:
        found[name] = _typed(next(arrays), np.float32 if name in _FLOAT_ROWS else np.int32)
    found["masks"] = _typed(found["masks"], np.uint32)
    start, ids, values = (next(arrays) for _ in range(3))
    edits = counts = None
    if start is not None and ids is not None and values is not None:
        edits = LogitEdits(start, ids, values.view(np.float32))
    start, ids, output_counts, pending = (next(arrays) for _ in range(4))
    if start is not None and ids is not None and output_counts is not None and pending is not None:
        counts = TokenCounts(start, ids, output_counts, pending.astype(np.bool_))
    return SamplingRows(
        **found,  # type: ignore[arg-type]
        max_logprobs=max_logprobs,
        all_greedy=all_greedy,
        edits=edits,
        counts=counts,
    )


def _plan(arrays: Iterator[AnyArray | None], groups: int) -> StepPlan:
    found = {name: next(arrays) for name in _PLAN}
    given = [
        _typed(next(arrays), np.float32 if name in _FLOAT_PATCHES else np.int32)
        for name in _PATCHES
    ]
    patches = None if given[0] is None else PatchRows(*given)  # type: ignore[arg-type]
    slots, tables = (tuple(next(arrays) for _ in range(groups)) for _ in range(2))
    return StepPlan(**found, slots=slots, block_tables=tables, patches=patches)  # type: ignore[arg-type]


def _typed(array: AnyArray | None, dtype: npt.DTypeLike) -> AnyArray | None:
    return None if array is None else array.view(dtype)
