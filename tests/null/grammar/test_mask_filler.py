"""Masks of many rows in one call."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vllmx_core.errors import GrammarError
from vllmx_engine.grammar.matcher import MaskFiller, allowed_ids

from .conftest import Grammarian


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_filled_together_are_those_filled_alone(
    grammarian: Grammarian, num_threads: int
) -> None:
    filler = MaskFiller(num_threads)
    grammars = [
        grammarian.compiled(regex=f"[{chr(97 + index)}-z]{{3,9}}[0-9]") for index in range(12)
    ]
    alone, together = ([grammar.start() for grammar in grammars] for _ in range(2))
    one = grammars[0].first_mask.copy()
    masks = np.zeros((len(grammars) + 2, one.size), np.uint32)
    for turn in range(4):
        assert all(filler.takes(matcher, masks) for matcher in together)
        places = [(matcher, 13 - index) for index, matcher in enumerate(together)]
        filler.fill(places, masks)
        for (matcher, row), other in zip(places, alone, strict=True):
            matcher.check()
            other.fill_mask(one)
            assert (masks[row] == one).all()
            token = allowed_ids(one).tolist()[turn]
            matcher.consume(token)
            other.consume(token)
    assert not masks[:2].any(), "rows of nobody are left alone"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_matcher_that_fails_fails_alone(grammarian: Grammarian, num_threads: int) -> None:
    grammar = grammarian.compiled(regex="[a-f]{3,9}")
    matchers = [grammar.start() for _ in range(9)]
    foreign = next(
        token
        for token in range(grammar.first_mask.size * 32)
        if token not in set(allowed_ids(grammar.first_mask).tolist())
    )
    with pytest.raises(GrammarError):
        matchers[4].consume(foreign)
    masks = np.zeros((9, grammar.first_mask.size), np.uint32)
    MaskFiller(num_threads).fill([(each, row) for row, each in enumerate(matchers)], masks)
    for index, matcher in enumerate(matchers):
        if index == 4:
            with pytest.raises(GrammarError):
                matcher.check()
        else:
            matcher.check()
            assert (masks[index] == grammar.first_mask).all()


def test_narrower_masks_are_not_taken(grammarian: Grammarian) -> None:
    grammar = grammarian.compiled(regex="a")
    masks = np.zeros((2, grammar.first_mask.size + 1), np.uint32)
    assert not MaskFiller().takes(grammar.start(), masks)
    assert not MaskFiller().takes(grammar.start(), masks[:, ::2])


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
