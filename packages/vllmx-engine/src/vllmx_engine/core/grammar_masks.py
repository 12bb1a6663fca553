"""The masks of a step's rows with a grammar, filled when their last tokens are known."""

from __future__ import annotations

import time

import numpy as np
from vllmx_core.errors import GrammarError
from vllmx_core.plan import U32
from vllmx_core.records import MutableRecord

from vllmx_engine.core.grammar_row import SLOW_S
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.grammar.matcher import GrammarMatcher, MaskFiller

_ALL = np.uint32(0xFFFFFFFF)
_USUAL_S = 1e-4
"""The usual seconds of a mask."""
_MEASURED_STEPS = 3
"""The number of steps that, less one, tell a row that is slow from a machine that was:
`GrammarRow.is_slow` takes two slow masks in a row."""


class Constrained(MutableRecord):
    """A logit row whose sequence follows a grammar."""

    logit: int
    sequence: Sequence
    mask: int = -1
    """The row among the step's masks."""
    must_end: bool = False
    """Nothing but an end of sequence may come, which `min_tokens` must not ban."""


class GrammarMasks:
    """Owned by the core's thread."""

    def __init__(self) -> None:
        self._filler = MaskFiller()
        self._num_measured = 0
        """Steps whose masks are made one by one, to see which of them takes long."""

    def fill(
        self, constrained: list[Constrained], masks: U32, number: int
    ) -> list[tuple[Sequence, Exception]]:
        """Fills rows of masks (N, W) for step `number`; returns sequences whose grammar failed,
        with the reasons. Their rows, and those whose tokens are not wanted, allow everything."""
        failed: list[tuple[Sequence, Exception]] = []
        wanted = []
        for row in constrained:
            sequence = row.sequence
            if sequence.finished or sequence.skipped_step == number:
                masks[row.mask] = _ALL
            else:
                wanted.append(row)
        filled = self._fill_due(wanted, masks)
        for row in wanted:
            mask = masks[row.mask]
            try:
                _finish(row, mask, filled.get(row.mask))
            except Exception as error:  # one request's fault must not stop the others
                mask[:] = _ALL
                failed.append((row.sequence, error))
        return failed

    def _fill_due(self, rows: list[Constrained], masks: U32) -> dict[int, GrammarMatcher]:
        """Matchers that can be filled in one call, by their rows of the masks."""
        self._num_measured = max(0, self._num_measured - 1)
        if len(rows) < 2 or self._num_measured:
            return {}
        due = {}
        for row in rows:
            matcher = None if row.sequence.grammar is None else row.sequence.grammar.due
            if matcher is not None and self._filler.takes(matcher, masks):
                due[row.mask] = matcher
        if due:
            started_s = time.perf_counter()
            self._filler.fill([(matcher, row) for row, matcher in due.items()], masks)
            if time.perf_counter() - started_s > SLOW_S + len(due) * _USUAL_S:
                self._num_measured = _MEASURED_STEPS
        return due


def _finish(row: Constrained, mask: U32, filled: GrammarMatcher | None) -> None:
    """What is left to do for a mask that may be `filled` already. Raises GrammarError."""
    sequence = row.sequence
    assert sequence.grammar is not None, sequence.request_id
    if filled is None:
        sequence.grammar.fill_mask(mask)
    else:
        filled.check()
    row.must_end = False
    rules = sequence.rules
    if rules is None:
        return
    if rules.mask is not None:
        mask &= rules.mask
    if rules.min_tokens and not sequence.grammar.is_free:
        row.must_end = not _without(mask, rules.stop_ids).any()
    if not mask.any():
        raise GrammarError(
            "the grammar and allowed_token_ids have no token in common here, so the answer cannot"
            " go on: allow the tokens that the grammar needs",
            param="allowed_token_ids",
        )


def _without(mask: U32, ids: list[int]) -> U32:
    rest = mask.copy()
    for token in ids:
        rest[token >> 5] &= ~np.uint32(1 << (token & 31))
    return rest
