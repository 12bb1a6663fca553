"""A lexer whose states run out: the answers that share it go on as if it had room."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vllmx_core.errors import GrammarError, GrammarLimitError
from vllmx_engine.grammar import matcher
from vllmx_engine.grammar.matcher import CompiledGrammar, LexerLostError, allowed_ids

from .conftest import Grammarian

FORGETFUL = "[0-9]{80}[a-zé ]*[ab].{12}[a-zé ]*[cd].{9}[a-zé ]*-"
"""Takes new states for nearly every token behind its digits, which are tried first."""

COSTLY = "|".join(f"[a-z]*{letter}[a-z]*" for letter in "abcdefghijklmnopq")
"""Takes thousands of states at once."""


def test_answers_share_a_lexer_that_runs_out_of_states(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = grammarian.compiled(regex=FORGETFUL)
    monkeypatch.setattr(matcher, "MAX_LEXER_STATES", 1200)
    narrow = grammarian.compiled(regex=FORGETFUL)
    shared, mask = narrow.start(), roomy.first_mask.copy()
    (digit,) = grammarian.tokenizer.encode("7", add_special_tokens=False)
    twins = [(roomy.start(), narrow.start(), random.Random(seed)) for seed in range(3)]
    for _ in range(80):
        for wide, tight, _ in twins:
            wide.consume(digit)
            tight.consume(digit)
    num_mended = 0
    for _ in range(40):
        for wide, tight, rng in twins:
            wide.fill_mask(mask)
            found = np.zeros_like(mask)
            try:
                tight.fill_mask(found)
            except LexerLostError:
                num_mended += 1
                tight.mend_mask(found)
            assert (found == mask).all()
            assert (tight.is_accepting, tight.is_stopped) == (wide.is_accepting, wide.is_stopped)
            token = int(rng.choice(allowed_ids(mask)))
            wide.consume(token)
            tight.consume(token)
            if forced := tight.forced_tokens():
                assert forced == wide.forced_tokens()
    assert num_mended >= 3
    shared.consume(digit)
    with pytest.raises(LexerLostError):  # of the first lexer, which none of the others has any more
        shared.fill_mask(mask)


def test_a_mask_that_no_lexer_has_room_for_is_its_own_answers_end(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "MAX_STEP_LEXER_FUEL", 600)
    monkeypatch.setattr(matcher, "MOST_LEXER_FUEL", 700)
    grammar = grammarian.compiled(regex=f"x{{30}}({COSTLY})-|[0-9]{{40}}")
    first, second = grammar.start(), grammar.start()
    (x,) = grammarian.tokenizer.encode("x", add_special_tokens=False)
    for _ in range(30):
        first.consume(x)
    mask = grammar.first_mask.copy()
    with pytest.raises(LexerLostError):
        first.fill_mask(mask)
    with pytest.raises(GrammarLimitError, match="too many expressions"):
        first.mend_mask(mask)
    (digit,) = grammarian.tokenizer.encode("7", add_special_tokens=False)
    for matching in (second, grammar.start()):
        for _ in range(5):
            matching.consume(digit)
        with pytest.raises(LexerLostError):
            matching.fill_mask(mask)
        matching.mend_mask(mask)
        assert digit in allowed_ids(mask)


def test_an_answer_with_a_costly_place_goes_on(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that need as much, while the others keep a lexer with little fuel."""
    monkeypatch.setattr(matcher, "MAX_STEP_LEXER_FUEL", 600)
    grammar = grammarian.compiled(regex=f"x{{30}}({COSTLY})-|[0-9]{{40}}")
    (x,) = grammarian.tokenizer.encode("x", add_special_tokens=False)
    (a,) = grammarian.tokenizer.encode("a", add_special_tokens=False)
    mask = grammar.first_mask.copy()
    answers = [grammar.start(), grammar.start()]
    for matching in answers:
        for _ in range(30):
            matching.consume(x)
        with pytest.raises(LexerLostError):
            matching.fill_mask(mask)
        matching.mend_mask(mask)
        for _ in range(9):
            assert a in allowed_ids(mask)
            matching.consume(a)
            matching.fill_mask(mask)
    assert answers[0]._lexer is answers[1]._lexer
    assert grammar.start()._lexer is not answers[0]._lexer


def test_a_lost_lexer_forces_no_tokens(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library names one more than what is forced, whose end it does not see any more."""
    pattern = f"x{{30}}({COSTLY})-"
    (x,) = grammarian.tokenizer.encode("x", add_special_tokens=False)
    sound = grammarian.compiled(regex=pattern)
    monkeypatch.setattr(matcher, "MAX_STEP_LEXER_FUEL", 600)
    monkeypatch.setattr(matcher, "MOST_LEXER_FUEL", 700)
    lossy = grammarian.compiled(regex=pattern)
    spoiler, one, twin = lossy.start(), lossy.start(), sound.start()
    for _ in range(5):
        one.consume(x)
        twin.consume(x)
    for _ in range(30):
        spoiler.consume(x)
    with pytest.raises(LexerLostError):
        spoiler.fill_mask(sound.first_mask.copy())
    assert one._matcher.deep_copy().compute_ff_tokens() != twin.forced_tokens()
    assert one.forced_tokens() == []


def test_a_token_that_may_not_come_is_told_by_the_next_mask(grammarian: Grammarian) -> None:
    grammar: CompiledGrammar = grammarian.compiled(regex="[0-9]{9}")
    matching, mask = grammar.start(), grammar.first_mask.copy()
    (x,) = grammarian.tokenizer.encode("x", add_special_tokens=False)
    matching.consume(x)
    assert not matching.is_stopped
    with pytest.raises(LexerLostError):
        matching.fill_mask(mask)
    with pytest.raises(GrammarError, match="satisfy the grammar"):
        matching.mend_mask(mask)
