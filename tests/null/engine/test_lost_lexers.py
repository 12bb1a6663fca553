"""Answers share the lexer of their grammar; one of them spoils it, and the others go on."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from vllmx_engine.core import grammar_rows
from vllmx_engine.core.grammar_rows import MaskFill
from vllmx_engine.grammar import matcher
from vllmx_engine.grammar.matcher import LexerLostError, Matcher
from vllmx_engine.wire.grammars import FreePart, Grammar, Thoughts
from vllmx_testing.fake import FakeRules

from .grammar_driver import EOS, LETTERS, VOCAB_SIZE, Driver, regex, text_of

COSTLY = "|".join(f"[a-z]*{letter}[a-z]*" for letter in "abcdefghijklmnopq")
"""Takes thousands of states at once."""
SHARED = f"x{{30}}({COSTLY})-|[0-6]{{2}}(-[0-6]{{5}}){{3}}"
FORGETFUL = "[a-z]*[ab][a-z]{6}[a-z]*[cd][a-z]{8}-"
"""Takes new states for nearly every token."""
ONLY_X, DIGITS = (LETTERS.index("x") + 1,), (*range(EOS), LETTERS.index("-") + 1)


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts answers that were mended, and grammars that were compiled."""
    found: Counter[str] = Counter()
    mend, compile_again = Matcher.mend_mask, matcher.CompiledGrammar.new_lexer

    def noted(one: Matcher, mask: Any) -> None:
        found["mended"] += 1
        mend(one, mask)

    def compiled(one: matcher.CompiledGrammar, fuel: int) -> Any:
        found["compiled"] += 1
        return compile_again(one, fuel)

    monkeypatch.setattr(Matcher, "mend_mask", noted)
    monkeypatch.setattr(matcher.CompiledGrammar, "new_lexer", compiled)
    return found


def add_sharers(driver: Driver) -> list[str]:
    """Rows that the grammar costs little, some of which begin later."""
    for number in range(6):
        params = {"max_tokens": 40, "allowed_token_ids": DIGITS}
        prompt = list(range(1, 2 + number * 2))
        driver.add(f"g{number}", regex(SHARED), seed=number, prompt=prompt, params=params)
    return [f"g{number}" for number in range(6)]


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_that_runs_out_of_work_ends_alone(
    is_slow: bool, overlap: bool, mended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "MAX_STEP_LEXER_FUEL", 600)
    monkeypatch.setattr(matcher, "MOST_LEXER_FUEL", 700)
    monkeypatch.setattr(grammar_rows, "SLOW_S", -1.0 if is_slow else float("inf"))
    alone = Driver(async_scheduling=overlap)
    names = add_sharers(alone)
    alone.run()
    assert not mended["mended"]
    driver = Driver(async_scheduling=overlap)
    params = {"max_tokens": 40, "allowed_token_ids": ONLY_X}
    for number in range(2):  # both fail by themselves
        driver.add(f"costly{number}", regex(SHARED), seed=number, params=params)
    while len(driver.ids["costly1"]) < 28:
        driver.step()
    add_sharers(driver)
    driver.run()
    assert mended["mended"] > 2
    for number in range(2):
        last = driver.last[f"costly{number}"]
        assert (last.finish_reason, last.error_code) == ("error", "grammar_limit"), last
        assert last.error is not None
        assert "too many expressions" in last.error
    assert {name: driver.ids[name] for name in names} == dict(alone.ids)
    assert all(driver.last[name].finish_reason == "stop" for name in names)
    driver.add("later", regex(SHARED), params={"max_tokens": 40, "allowed_token_ids": DIGITS})
    driver.run()
    assert re.fullmatch(SHARED, driver.text("later"))


def test_a_lexer_that_many_answers_filled_is_compiled_anew(
    mended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are counted for all answers together, so none of them did anything wrong."""

    def answers(most_states: int) -> Driver:
        monkeypatch.setattr(matcher, "MAX_LEXER_STATES", most_states)
        driver = Driver()
        for number in range(8):
            fields: dict[str, Any] = {"seed": number, "prompt": [number], "params": FORTY}
            driver.add(f"g{number}", regex("x{25}" + FORGETFUL), stop_ids=[], **fields)
        driver.run()
        return driver

    expected = answers(1 << 20)
    assert not mended["mended"]
    mended.clear()
    driver = answers(100)
    assert mended["compiled"] > 2
    assert driver.ids == expected.ids
    assert {one.finish_reason for one in driver.last.values()} == {"length"}


FORTY = {"max_tokens": 40}
PATTERNS = [
    '\\{"name": "[a-z]{2,4}", "age": [0-6]{2}, "done": (a|b)\\}',
    "[a-z]{3}(-abcdefg-[0-4]){2}",
    "[a-z ]{5,9}",
    "[0-6]{6}",
]


def answers(losses: int, **options: Any) -> Driver:
    """Many rows of all kinds. One of so many tokens and masks meets a lost lexer; 0: none does."""
    driver, rng = Driver(**options), random.Random(3)
    consume, fill = Matcher.consume, Matcher.fill_mask

    def lose(one: Matcher) -> bool:
        is_shared = one._lexer is one._grammar._shared.get(one._lexer.fuel)
        if not losses or one._is_lost or not is_shared or rng.randrange(losses):
            return False
        one._is_lost, one._is_suspect = True, rng.random() < 0.3
        one._lexer.is_lost = True
        return True

    def lossy_consume(one: Matcher, token: int) -> None:
        lose(one)
        consume(one, token)

    def lossy_fill(one: Matcher, mask: Any) -> None:
        if one._tokens and lose(one):  # and not while the grammar is tried
            raise LexerLostError("lost")
        fill(one, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "_TRIALS", 1)
        patch.setattr(matcher, "_TRIAL_TOKENS", 1)
        patch.setattr(Matcher, "consume", lossy_consume)
        patch.setattr(Matcher, "fill_mask", lossy_fill)
        for number in range(12):
            asked: dict[str, Any] = {"max_tokens": 40}
            if number % 3 == 2:
                asked |= {"logprobs": 2, "presence_penalty": 0.5, "min_tokens": 6}
            fields: dict[str, Any] = {"seed": number, "prompt": [*range(1 + number % 5)] or [1]}
            fields |= {"params": asked, "at_end": number % 4 == 1}
            if number % 2:
                fields["stop_ids"] = []  # nothing but the grammar ends it
            driver.add(f"g{number}", regex(PATTERNS[number % 4]), **fields)
            driver.add(f"p{number}", None, seed=number, params={"max_tokens": 9})
        end = (LETTERS.index("}") + 1,)
        form = regex(PATTERNS[3], FreePart((end,)))
        form = Grammar(form.text, form.free, Thoughts(5, (), end))
        driver.add("thinks", form, params={"max_tokens": 40}, stop_ids=[])
        driver.run()
    return driver


STATES = FakeRules(vocab_size=VOCAB_SIZE, has_states=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"blocks": 24},
        {"stages": 3},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(6,)), "blocks": 30},
        {"rules": STATES},
        {"rules": STATES, "stages": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("losses", "drafts"), [(2, False), (9, False), (0, True), (9, True)])
def test_neither_lost_lexers_nor_drafts_change_answers(
    losses: int, drafts: bool, options: dict[str, Any]
) -> None:
    sound = answers(0, **options)
    if drafts:
        options = {**options, "drafts": dict(sound.ids)}
    lossy = answers(losses, **options)
    assert lossy.ids == sound.ids
    assert lossy.logprobs == sound.logprobs
    ends = {name: (last.finish_reason, last.stop_id) for name, last in sound.last.items()}
    assert {name: (one.finish_reason, one.stop_id) for name, one in lossy.last.items()} == ends
    assert ("stop", None) in ends.values()
    for number in range(0, 12, 4):
        assert re.fullmatch(PATTERNS[0], text_of(lossy.ids[f"g{number}"]))
    stats = lossy.core.stats()
    assert (stats.num_accepted_tokens > 0) == drafts
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_a_core_that_closes_mends_nothing() -> None:
    """The threads that would do so are gone."""

    class Lost:
        def fill_mask(self, mask: Any) -> None:
            raise LexerLostError("lost")

    def refuse(run: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    fill = MaskFill(Lost(), 2, matcher.MaskPace(), refuse)  # type: ignore[arg-type]
    fill.run()
    assert fill.is_done
    assert isinstance(fill.error, RuntimeError)
