"""Frames: plans and sampling rows as flat arrays of 32-bit words.

A frame is a head of numbers, the arrays that every step has, then optional ones. Nothing is
pickled; the reader gets views. Neighbouring arrays of one type are copied together, because writing
and reading delays a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

_HEAD = 10
"""Words: presence of a plan and of rows, T, R, L, cache groups, blocks of the widest row, sampling
rows, max_logprobs, all_greedy. They are followed by a count and, for each optional array of the
step, its number in `_PLACES` and two lengths (the second is -1 for one axis)."""
_INTS = ("top_k", "position", "target", "num_logprobs")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_OPTIONAL: dict[str, dict[str, npt.DTypeLike]] = {
    "plan": dict.fromkeys(
        (
            "state_from",
            "state_to",
            "state_after",
            "token_types",
            "rope_positions",
            "feature_rows",
            "visible_to",
            "tap_rows",
            "own_rows",
            "cross_rows",
            "adapters",
        ),
        np.int32,
    ),
    "patches": {
        "values": np.float32,
        "table_rows": np.int32,
        "table_weights": np.float32,
        "keep": np.int32,
        "windows": np.int32,
    },
    "rows": {"mask_index": np.int32, "masks": np.uint32, "group_from": np.int32, "whole": np.int32},
    "edits": {"start": np.int32, "ids": np.int32, "values": np.float32},
    "counts": {
        "start": np.int32,
        "ids": np.int32,
        "output_counts": np.int32,
        "pending": np.bool_,
    },
}
"""Optional arrays by owner, and their types; booleans are sent as words."""
_PLACES = [(owner, name) for owner, names in _OPTIONAL.items() for name in names]
_NUMBERS = {place: number for number, place in enumerate(_PLACES)}


class Frame:
    """A frame with a plan, sampling rows, or both.

    Attributes:
        num_words: that `write` fills.
    """

    def __init__(self, plan: StepPlan | None, rows: SamplingRows | None) -> None:
        self._plan, self._rows = plan, rows
        head, size = [0] * _HEAD, 0
        if plan is not None:
            tables = plan.block_tables
            tokens, num_rows, logit_rows = len(plan.tokens), len(plan.context_len), plan.logit_rows
            groups, width = len(plan.slots), tables[0].shape[1] if tables else 0
            head[:7] = 1, 0, tokens, num_rows, len(logit_rows), groups, width
            size = (2 + groups) * tokens + 2 * num_rows + 1 + len(logit_rows)
            size += groups * num_rows * width
        if rows is not None:
            sampled = len(rows.seed)
            head[1], head[7:] = 1, (sampled, rows.max_logprobs, int(rows.all_greedy))
            size += (2 + len(_INTS) + len(_FLOATS)) * sampled
        self._more = list(_present(plan, rows))
        head.append(len(self._more))
        for number, array in self._more:
            head += number, array.shape[0], array.shape[1] if array.ndim == 2 else -1
            size += array.size
        head += [0] * (len(head) & 1)  # seeds, which have eight bytes, come next
        self._head = head
        self.num_words = len(head) + size

    def write(self, words: I32) -> None:
        """Writes the frame into the first `num_words`."""
        plan, rows, at = self._plan, self._rows, len(self._head)
        words[:at] = self._head
        if rows is not None:
            count = len(rows.seed)
            words[at : at + 2 * count].view(np.uint64)[:] = rows.seed
            floats = at + 2 * count
            at = floats + len(_FLOATS) * count
            np.concatenate(
                [getattr(rows, name) for name in _FLOATS], out=words[floats:at].view(np.float32)
            )
        ints = [] if rows is None else [getattr(rows, name) for name in _INTS]
        if plan is not None:
            ints += plan.tokens, plan.positions, plan.query_start, plan.context_len
            ints += plan.logit_rows, *plan.slots
        begin, at = at, at + sum(map(len, ints))
        if ints:
            np.concatenate(ints, out=words[begin:at])
        for table in () if plan is None else plan.block_tables:
            begin, at = at, at + table.size
            words[begin:at].reshape(table.shape)[:] = table
        for number, array in self._more:
            begin, at = at, at + array.size
            words[begin:at].view(_word_type(number))[:] = array.reshape(-1)

    def to_bytes(self) -> bytes:
        """The frame as bytes, for readers without a ring."""
        words = np.empty(self.num_words, np.int32)
        self.write(words)
        return words.tobytes()


class PartFrame:
    """A frame with the begin and end of a part of a pass."""

    num_words = 4

    def __init__(self, begin: float, end: float) -> None:
        self._part = np.array([begin, end])

    def write(self, words: I32) -> None:
        """See `Frame.write`."""
        words[:] = self._part.view(np.int32)

    def to_bytes(self) -> bytes:
        """See `Frame.to_bytes`."""
        return self._part.tobytes()


def read_part(words: I32) -> tuple[float, float]:
    """Reads a `PartFrame`."""
    begin, end = words.view(np.float64).tolist()
    return begin, end


class SentFrame:
    """A frame that is already encoded, such as another host's."""

    def __init__(self, words: I32) -> None:
        self._words, self.num_words = words, len(words)

    def write(self, words: I32) -> None:
        """See `Frame.write`."""
        words[:] = self._words

    def to_bytes(self) -> bytes:
        """See `Frame.to_bytes`."""
        return self._words.tobytes()


AnyFrame = Frame | PartFrame | SentFrame


def _word_type(number: int) -> npt.DTypeLike:
    owner, name = _PLACES[number]
    dtype = _OPTIONAL[owner][name]
    return np.int32 if dtype is np.bool_ else dtype


def _present(plan: StepPlan | None, rows: SamplingRows | None) -> Iterator[tuple[int, AnyArray]]:
    """The optional arrays that the step has, by their numbers."""
    owners: list[tuple[str, object | None]] = []
    if plan is not None:
        owners += ("plan", plan), ("patches", plan.patches)
    if rows is not None:
        owners += ("rows", rows), ("edits", rows.edits), ("counts", rows.counts)
    for owner, whose in owners:
        for name in () if whose is None else _OPTIONAL[owner]:
            array = getattr(whose, name)
            if array is not None:
                yield _NUMBERS[owner, name], array


def read_frame(words: I32) -> tuple[StepPlan | None, SamplingRows | None]:
    """Views of a frame's contents."""
    size = _HEAD + 1 + 3 * int(words[_HEAD])
    head = words[:size].tolist()
    has_plan, has_rows, tokens, rows, logit_rows, groups, width, sampled, *_ = head
    at = size + (size & 1)
    numbers: list[Any] = []
    if has_rows:
        numbers, at = _read_numbers(words, at, sampled)
    given: list[AnyArray] = []
    for length in (tokens, tokens, rows + 1, rows, logit_rows) if has_plan else ():
        given.append(words[at : at + length])
        at += length
    begin, at = at, at + groups * tokens
    slots = tuple(words[begin:at].reshape(groups, tokens))
    begin, at = at, at + groups * rows * width
    tables = tuple(words[begin:at].reshape(groups, rows, width))
    found = _read_optional(words, at, head) if head[_HEAD] else {}
    plan = sampling = None
    if has_plan:
        patches = found.get("patches")
        plan = StepPlan(
            given[0],
            given[1],
            slots,
            given[2],
            given[3],
            tables,
            given[4],
            patches=None if patches is None else PatchRows(**patches),
            **found.get("plan", {}),
        )
    if has_rows:
        edits, counts = found.get("edits"), found.get("counts")
        facts = {"max_logprobs": head[8], "all_greedy": bool(head[9])} | found.get("rows", {})
        facts["edits"] = None if edits is None else LogitEdits(**edits)
        facts["counts"] = None if counts is None else TokenCounts(**counts)
        sampling = SamplingRows(*numbers, **facts)
    return plan, sampling


def _read_numbers(words: I32, at: int, count: int) -> tuple[list[Any], int]:
    """The first fields of `SamplingRows` in order, and the end of them."""
    seed = words[at : at + 2 * count].view(np.uint64)
    begin = at + 2 * count
    at = begin + len(_FLOATS) * count
    temperature, top_p, min_p, *penalties = (
        words[begin:at].view(np.float32).reshape(len(_FLOATS), count)
    )
    begin, at = at, at + len(_INTS) * count
    top_k, position, target, num_logprobs = words[begin:at].reshape(len(_INTS), count)
    found = [temperature, top_k, top_p, min_p, *penalties, seed, position, target, num_logprobs]
    return found, at


def _read_optional(words: I32, at: int, head: list[int]) -> dict[str, dict[str, Any]]:
    """Reads the optional arrays, by the object that they belong to."""
    found: dict[str, dict[str, Any]] = {}
    for place in range(_HEAD + 1, len(head), 3):
        number, first, second = head[place : place + 3]
        owner, name = _PLACES[number]
        size = first * second if second >= 0 else first
        array: AnyArray = words[at : at + size].view(_word_type(number))
        at += size
        if second >= 0:
            array = array.reshape(first, second)
        if _OPTIONAL[owner][name] is np.bool_:
            array = array.astype(np.bool_)
        found.setdefault(owner, {})[name] = array
    return found
