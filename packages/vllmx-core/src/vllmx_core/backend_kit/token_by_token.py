"""Equal bits in any batch on backends whose libraries choose the order of sums by shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from vllmx_core.adapters import Adapter
from vllmx_core.backend import LoadedInfo, MovableCache
from vllmx_core.plan import (
    I32,
    LogitEdits,
    LogprobRows,
    SamplingRows,
    StepPlan,
    StepResult,
    TokenCounts,
)

_OF_ROWS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "position", "target", "num_logprobs", "mask_index", "group_from"),
)
"""Arrays of `SamplingRows` with an entry for each logit row."""


class TokenByToken:
    """A `LoadedModel` over another one, `model`, that gives it each token as a step of its own. So
    the shape of each product depends on the token's position alone: neither on other rows nor on
    how a prompt was cut or found in the cache. A step has run when it is in flight.

    Args:
        whole_rows: the tokens of a row see each other both ways: a row is a step.
    """

    def __init__(self, model: Any, *, whole_rows: bool) -> None:
        self._model, self._whole_rows = model, whole_rows
        self._last_ids = np.zeros(1, np.int32)

    @property
    def info(self) -> LoadedInfo:
        info: LoadedInfo = self._model.info
        return info

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`."""
        cache: MovableCache = self._model.movable_cache
        return cache

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters`."""
        self._model.set_adapter(slot, adapter)

    def step(self, plan: StepPlan, rows: SamplingRows) -> Ready:
        """See `vllmx_core.backend.LoadedModel.step`."""
        return Ready(self._run(plan, rows))

    def forward(self, plan: StepPlan) -> Late:
        """See `vllmx_core.backend.LoadedModel.forward`. All of it runs with its sampling."""
        return Late(self, _copied(plan))

    def close(self) -> None:
        self._model.close()

    def _run(self, plan: StepPlan, rows: SamplingRows) -> StepResult:
        known = self._last_ids[np.where(plan.tokens < 0, -plan.tokens - 1, 0)]
        tokens = np.where(plan.tokens < 0, np.maximum(known, 0), plan.tokens).astype(np.int32)
        results, elapsed_s, first = list[StepResult](), 0.0, 0
        for part in parts_of(replace(plan, tokens=tokens), whole_rows=self._whole_rows):
            end = min(first + part.num_logit_rows, rows.num_rows)
            result: StepResult = self._model.step(part, part_of(rows, first, end)).result()
            elapsed_s += result.elapsed_s
            if part.num_logit_rows or not results:
                results.append(result)
            first = end
        if rows.num_rows:
            results = [one for one in results if one.ids.size]
        found = _joined(results, elapsed_s)
        if rows.num_rows:
            self._last_ids = found.ids
        return found


class Ready:
    """A `StepHandle` with its result."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class Late:
    """A `ForwardStep` that has done nothing yet."""

    def __init__(self, model: TokenByToken, plan: StepPlan) -> None:
        self._model, self._plan = model, plan

    def sample(self, rows: SamplingRows) -> Ready:
        return self._model.step(self._plan, rows)


def parts_of(plan: StepPlan, *, whole_rows: bool) -> Iterator[StepPlan]:
    """Plans of a token each, or of a row each, that compute together what `plan` does."""
    for row, (begin, end) in enumerate(pairwise(plan.query_start.tolist())):
        state = None if plan.state_from is None else plan.state_from[row : row + 1]
        ends = [end] if whole_rows else range(begin + 1, end + 1)
        for stop in ends:
            start = begin if whole_rows else stop - 1
            part = slice(start, stop)
            target = _state_behind(plan, row, stop, is_last=stop == end)
            logits = plan.logit_rows[(plan.logit_rows >= start) & (plan.logit_rows < stop)]
            turned = plan.rope_positions
            yield StepPlan(
                tokens=plan.tokens[part],
                positions=plan.positions[part],
                slots=tuple(slots[part] for slots in plan.slots),
                query_start=np.array([0, stop - start], np.int32),
                context_len=plan.context_len[row : row + 1] - np.int32(end - stop),
                block_tables=tuple(table[row : row + 1] for table in plan.block_tables),
                logit_rows=logits - np.int32(start),
                state_from=state,
                state_to=target,
                token_types=None if plan.token_types is None else plan.token_types[part],
                rope_positions=None if turned is None else np.ascontiguousarray(turned[:, part]),
                adapters=None if plan.adapters is None else plan.adapters[row : row + 1],
            )
            state = target


def _state_behind(plan: StepPlan, row: int, stop: int, *, is_last: bool) -> I32 | None:
    """(1,) the slot of a row's states behind the token before `stop`: one that keeps them, or else
    the row's own."""
    if plan.state_to is None:
        return None
    kept = None if plan.state_after is None or is_last else plan.state_after[stop - 1 : stop]
    return plan.state_to[row : row + 1] if kept is None or kept[0] < 0 else kept


def part_of(rows: SamplingRows, first: int, end: int) -> SamplingRows:
    """The parameters of neighbouring logit rows, as if there were no others."""
    arrays = {name: getattr(rows, name) for name in _OF_ROWS}
    cut: dict[str, Any] = {
        name: None if array is None else array[first:end] for name, array in arrays.items()
    }
    if (edits := rows.edits) is not None:
        start, held = _entries(edits.start, first, end)
        cut["edits"] = LogitEdits(start, edits.ids[held], edits.values[held])
    if (counts := rows.counts) is not None:
        start, held = _entries(counts.start, first, end)
        pending = counts.pending[first:end]
        cut["counts"] = TokenCounts(start, counts.ids[held], counts.output_counts[held], pending)
    if (whole := rows.whole) is not None:
        whole = whole[(whole >= first) & (whole < end)] - np.int32(first)
        cut["whole"] = whole if whole.size else None
    drawn = cut["target"] < 0
    return replace(rows, **cut, all_greedy=not cut["temperature"][drawn].any())


def _entries(start: I32, first: int, end: int) -> tuple[I32, slice]:
    begin = start[first]
    return start[first : end + 1] - begin, slice(int(begin), int(start[end]))


def _joined(results: Sequence[StepResult], elapsed_s: float) -> StepResult:
    """One result of neighbouring rows."""

    def join(arrays: Sequence[Any]) -> Any:
        given = [array for array in arrays if array is not None]
        return np.concatenate(given) if given else None

    logprobs = [one.logprobs for one in results if one.logprobs is not None]
    names = LogprobRows.__struct_fields__
    return StepResult(
        join([one.ids for one in results]),
        LogprobRows(*(join([getattr(one, name) for one in logprobs]) for name in names))
        if logprobs
        else None,
        join([one.logits for one in results]),
        elapsed_s,
        join([one.vectors for one in results]),
    )


def _copied(plan: StepPlan) -> StepPlan:
    """A plan that outlives the call: the engine uses its arrays again."""

    def copy(value: Any) -> Any:
        return tuple(map(copy, value)) if isinstance(value, tuple) else np.copy(value)

    given = {name: getattr(plan, name) for name in StepPlan.__struct_fields__}
    return replace(
        plan, **{name: copy(value) for name, value in given.items() if value is not None}
    )
