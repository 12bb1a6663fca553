"""The masks of a step's rows with a grammar, filled when their last tokens are known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing

import numpy as np
from vllmx_core.errors import GrammarError
from vllmx_core.plan import U32
from vllmx_core.records import MutableRecord, field

from vllmx_engine.core.grammar_rows import MaskFill, MaskThreads
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.grammar.matcher import LexerLostError

_ALL = np.uint32(0xFFFFFFFF)
PATIENCE_S = 0.002
"""A step waits so long for masks at the least, and longer by `USUAL_S` for each."""
USUAL_S = 1e-4
"""The usual seconds of a mask, on a slow machine."""
PATIENCE_SHARE = 0.25
"""A step waits for masks for this share of its expected time if its forward pass runs meanwhile:
the pass is still in its first part then, so the wait costs nothing."""


class Constrained(MutableRecord):
    """A logit row whose sequence follows a grammar."""

    logit: int
    sequence: Sequence
    mask: U32 | None = None
    """(W,) its place among the step's masks."""
    must_end: bool = False
    """Nothing but an end of sequence may come, which `min_tokens` must not ban."""


class FilledMasks(MutableRecord):
    """The sequences without a mask."""

    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences whose grammars failed, with the reasons."""
    ended: list[Sequence] = field(default_factory=list)
    """Sequences that turn out to have ended with their last tokens."""
    late: list[Sequence] = field(default_factory=list)
    """Sequences whose masks are still being made."""


class GrammarMasks:
    """Owned by the core's thread."""

    def __init__(self) -> None:
        self._threads = MaskThreads()

    def fill(
        self,
        constrained: list[Constrained],
        number: int,
        patience: Callable[[], float],
        may_be_late: Callable[[Sequence], bool],
    ) -> FilledMasks:
        """Fills the rows' masks for step `number`. Where that takes more than `patience()`
        seconds, those that are not done are late; but a sequence is waited for that must not be.
        Rows of late ones, of grammars that failed and of tokens that are not wanted allow
        everything."""
        filled = FilledMasks()
        wanted = []
        for row in constrained:
            if row.sequence.finished or row.sequence.skipped_step == number:
                _allow_all(row)
            else:
                wanted.append(row)
        if not self._threads.is_worth_waking(len(wanted)):
            wanted = _fill_quick(wanted, filled)
        self._run(wanted, patience)
        for row in wanted:
            fill = _fill_of(row)
            if fill is not None and not fill.is_done and not may_be_late(row.sequence):
                fill.wait()
            if fill is not None and not fill.is_done:
                _allow_all(row)
                filled.late.append(row.sequence)
            else:
                _try_fill(row, filled)
        return filled

    def _run(self, rows: list[Constrained], patience: Callable[[], float]) -> None:
        """Fills masks that have not begun, and waits for them."""
        fills = [fill for row in rows if (fill := _fill_of(row)) and not fill.is_begun]
        if fills:
            self._threads.run(fills, patience)

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        self._threads.close()


def _fill_quick(rows: list[Constrained], filled: FilledMasks) -> list[Constrained]:
    """Makes masks of quick grammars here and now; returns the rows that have no mask yet."""
    others: list[Constrained] = []
    last_s = time.thread_time()
    for row in rows:
        fill = _fill_of(row)
        if fill is None or not fill.is_quick:
            others.append(row)
            continue
        if not _try_fill(row, filled, fill):
            others.append(row)
        before_s, last_s = last_s, time.thread_time()
        fill.pace.observe(last_s - before_s)
    return others


def _fill_of(row: Constrained) -> MaskFill | None:
    assert row.sequence.grammar is not None, row.sequence.request_id
    return row.sequence.grammar.next_fill()


def _allow_all(row: Constrained) -> None:
    assert row.mask is not None, row.sequence.request_id
    row.mask[:] = _ALL


def _try_fill(row: Constrained, filled: FilledMasks, quick: MaskFill | None = None) -> bool:
    """Writes a mask that is there, or is made by `quick`. False where it has to be made later."""
    assert row.mask is not None
    assert row.sequence.grammar is not None, row.sequence.request_id
    try:
        if quick is None:
            row.sequence.grammar.fill_mask(row.mask)
        else:
            quick.fill_now(row.mask)
        if quick is None and row.sequence.grammar.has_ended:
            _allow_all(row)
            filled.ended.append(row.sequence)
        else:
            _apply_rules(row, row.mask)
    except LexerLostError:
        return False
    except Exception as error:  # one request's fault must not stop the others
        row.mask[:] = _ALL
        filled.failed.append((row.sequence, error))
    return True


def _apply_rules(row: Constrained, mask: U32) -> None:
    """Leaves of a mask what the rules of its request allow. Raises GrammarError."""
    sequence = row.sequence
    assert sequence.grammar is not None, sequence.request_id
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


def fill_drafted(group: list[Constrained], draft: list[int]) -> bool:
    """Fills the masks of a row with a draft: `group[i]` comes behind i tokens of the draft. Where a
    later mask cannot be made, the draft is cut before it. False, with masks that allow everything,
    where the first one must be made elsewhere."""
    grammar = group[0].sequence.grammar
    assert grammar is not None, group[0].sequence.request_id
    masks = [row.mask for row in group if row.mask is not None]
    made = 0
    error: Exception | None = None
    with closing(grammar.masks_behind(draft, masks)) as filled:
        try:
            for row, mask in zip(group, filled, strict=True):
                _apply_rules(row, mask)
                made += 1
        except Exception as found:  # one request's fault must not stop the others
            error = found
    for row in group[made:]:
        _allow_all(row)
    del draft[max(0, made - 1) :]
    if not made and error is not None and not isinstance(error, LexerLostError):
        raise error
    return made > 0


def forbids_all(sequence: Sequence, constrained: Iterable[Constrained]) -> bool:
    """True if a sequence's own rules forbid every token that its grammar and its
    `allowed_token_ids` allow next. `constrained`: the rows of the step with their masks."""
    rules = sequence.rules
    if rules is None:
        return False
    mask, generated = rules.mask, len(sequence.tokens) - sequence.num_prompt
    for row in constrained:
        if row.sequence is sequence:
            mask = row.mask
            generated = max(generated, rules.min_tokens) if row.must_end else generated
    if mask is None:
        return False
    ids, values = rules.edits(sequence.tokens, generated)
    banned = [token for token, value in zip(ids, values, strict=True) if value == -math.inf]
    return not _without(mask, banned).any()


def _without(mask: U32, ids: list[int]) -> U32:
    rest = mask.copy()
    for token in ids:
        rest[token >> 5] &= ~np.uint32(1 << (token & 31))
    return rest
