"""The masks of a step's rows with a grammar, filled when their last tokens are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from vllmx_core.errors import GrammarError
from vllmx_core.plan import U32

from vllmx_engine.core.sequence import Sequence

_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class Constrained:
    """A logit row whose sequence follows a grammar."""

    logit: int
    sequence: Sequence
    mask: int = -1
    """Its row of the step's masks."""
    must_end: bool = False
    """Nothing but an end of sequence may come, which `min_tokens` must not ban."""


def fill_masks(
    constrained: list[Constrained], masks: U32, number: int
) -> list[tuple[Sequence, Exception]]:
    """Fills rows of masks (N, W) for step `number`; returns sequences whose grammar failed, with
    the reasons. Their rows, and those whose tokens are not wanted, allow everything."""
    failed: list[tuple[Sequence, Exception]] = []
    for row in constrained:
        sequence, mask = row.sequence, masks[row.mask]
        if sequence.finished or sequence.skipped_step == number:
            mask[:] = _ALL
            continue
        try:
            _fill(row, mask)
        except Exception as error:  # one request's fault must not stop the others
            mask[:] = _ALL
            failed.append((sequence, error))
    return failed


def _fill(row: Constrained, mask: U32) -> None:
    sequence = row.sequence
    assert sequence.grammar is not None, sequence.request_id
    sequence.grammar.fill_mask(mask)
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
