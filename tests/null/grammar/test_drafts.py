"""Masks for the positions of a draft."""

from __future__ import annotations

import random

import pytest
from vllmx_engine.grammar.matcher import allowed_ids

from .conftest import Grammarian


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[a-c]{2,9}(x|yz)[0-9]{1,4}"},
        {"json": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'},
        {"grammar": 'start: "(" start ")" | /[a-z]+/'},
    ],
)
def test_drafts_are_taken_back(grammarian: Grammarian, form: dict[str, str]) -> None:
    """A mask for each position of a draft, and after each length of what was kept of it the masks
    of an answer that has so many tokens."""
    grammar = grammarian.compiled(**form)
    plain, masks, draft = grammar.start(), [grammar.first_mask.copy()], []
    rng = random.Random(3)
    while len(draft) < 6 and not plain.is_stopped:
        draft.append(rng.choice(allowed_ids(masks[-1]).tolist()))
        plain.consume(draft[-1])
        masks.append(masks[-1].copy())
        plain.fill_mask(masks[-1])
    assert len(draft) > 1
    matcher, mask = grammar.start(), grammar.first_mask.copy()
    for kept in range(len(draft)):
        for position, token in enumerate(draft[kept:], kept):
            matcher.fill_mask(mask)
            assert (mask == masks[position]).all()
            matcher.consume(token)
        matcher.rollback(len(draft) - kept)
        matcher.fill_mask(mask)
        assert (mask == masks[kept]).all()
        matcher.consume(draft[kept])
