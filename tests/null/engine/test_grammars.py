"""Rows that follow grammars: in any batch, preempted, late, beside plain ones."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_engine.core import commit, grammar_rows, grammars
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.grammar_rows import MaskFill
from vllmx_engine.grammar import matcher
from vllmx_engine.wire.grammars import FreePart, Grammar, Vocabulary
from vllmx_engine.wire.messages import Follower, choices_of
from vllmx_testing.fake import FakeRules

from tests.waiting import PATIENCE_S

from .grammar_driver import EOS, LETTERS, VOCAB_SIZE, Driver, regex, text_of

PATTERNS = [
    "[a-f]{3}-[0-4]{2}",
    "(yes|no|maybe) [0-6]",
    '\\{"a": [0-6]{1,3}\\}',
    "x{0,5}y",
    "[a-z ]{5,9}",
]


@pytest.mark.parametrize("overlap", [True, False])
def test_each_row_of_a_batch_follows_its_grammar(overlap: bool) -> None:
    driver = Driver(async_scheduling=overlap)
    for number in range(20):
        driver.add(f"g{number}", regex(PATTERNS[number % 5]), seed=number, prompt=[number, 3])
        driver.add(f"p{number}", None, seed=number, prompt=[number, 3])
    driver.run()
    for number in range(20):
        assert re.fullmatch(PATTERNS[number % 5], driver.text(f"g{number}"))
    alone = Driver(async_scheduling=overlap)
    for number in range(20):
        alone.add(f"p{number}", None, seed=number, prompt=[number, 3])
    alone.run()
    assert {name: driver.ids[name] for name in alone.ids} == alone.ids


def test_answers_do_not_depend_on_preemption_or_overlap() -> None:
    found = []
    for blocks, overlap in ((64, True), (64, False), (14, True), (14, False)):
        driver = Driver(blocks=blocks, async_scheduling=overlap)
        for number in range(8):
            driver.add(f"g{number}", regex("([a-z]{4}-){3,4}"), seed=number, prompt=list(range(9)))
        driver.run()
        assert (driver.core.stats().num_preemptions > 0) == (blocks == 14)
        found.append(dict(driver.ids))
        for number in range(8):
            assert re.fullmatch("([a-z]{4}-){3,4}", driver.text(f"g{number}"))
    assert found[1:] == found[:1] * 3


def test_steps_without_grammars_are_launched_whole() -> None:
    driver = Driver()
    for number in range(4):
        driver.add(f"p{number}", None)
    driver.run()
    assert driver.model.num_forwards == 0
    driver.add("g", regex("[a-z]{6}"))
    driver.run()
    assert driver.model.num_forwards > 0


def test_a_grammar_that_can_only_end_ends_without_an_end_of_sequence() -> None:
    """The answer ends whatever `min_tokens` says, and where the model has no such token."""
    driver = Driver()
    driver.add("short", regex("abc"), params={"min_tokens": 20})
    driver.add("endless", regex("abc"), stop_ids=[])
    driver.add("empty", regex("a?"), params={"min_tokens": 20}, seed=1)
    driver.run()
    assert [driver.text(name) for name in ("short", "endless")] == ["abc", "abc"]
    assert driver.last["short"].stop_id is None
    assert driver.text("empty") == "a"  # not at once, because it may go on


def test_min_tokens_hold_where_the_grammar_may_go_on() -> None:
    driver = Driver()
    for number in range(8):
        driver.add(f"g{number}", regex("[a-z]+"), params={"min_tokens": 6}, seed=number)
    driver.run()
    assert all(len(ids) >= 6 for ids in driver.ids.values())


@pytest.mark.parametrize("overlap", [True, False])
def test_only_what_begins_as_a_free_part_is_one(overlap: bool) -> None:
    """Thoughts that the model may begin: "{a ... }" and then the form, or the form at once."""
    begin, end = (LETTERS.index("{") + 1, LETTERS.index("a") + 1), (LETTERS.index("}") + 1,)
    driver = Driver(async_scheduling=overlap)
    asked = {"max_tokens": 60}
    for number in range(40):
        grammar = regex("[0-2]{4}", FreePart((end,), begin))
        driver.add(f"g{number}", grammar, seed=number, prompt=[number], params=asked, stop_ids=[])
    held = regex("\\{[0-6]{3}", FreePart((end,), begin))
    driver.add("held", held, params={"max_tokens": 9})
    driver.run()
    num_free = 0
    for number in range(40):
        text = text_of(driver.ids[f"g{number}"])
        if not text.startswith("{"):
            assert re.fullmatch("[0-2]{4}", text)
            continue
        assert text.startswith("{a")
        num_free += 1
        if "}" in text:
            assert re.fullmatch("[0-2]{0,4}", text[text.index("}") + 1 :])
    assert 0 < num_free < 40
    assert re.fullmatch("{[0-6]{3}", driver.text("held"))  # the form itself begins so


def test_no_answer_ends_in_front_of_its_form() -> None:
    end = (LETTERS.index("a") + 1,)
    driver = Driver()
    for number in range(8):
        for name, held in (("held", (EOS,)), ("loose", ())):
            grammar = regex("[0-6]{4}", FreePart((end,), held_ids=held))
            asked = {"max_tokens": 60}
            driver.add(f"{name}{number}", grammar, seed=number, prompt=[number], params=asked)
    driver.run()
    for number in range(8):
        if driver.last[f"held{number}"].finish_reason == "stop":
            assert re.fullmatch("a[0-6]{4}", driver.text(f"held{number}")[-5:])
    reasons = [driver.last[f"loose{number}"].finish_reason for number in range(8)]
    assert "stop" in reasons
    ended = [driver.text(f"loose{n}") for n in range(8) if reasons[n] == "stop"]
    assert not all(re.fullmatch("a[0-6]{4}", text[-5:]) for text in ended)


def test_a_grammar_begins_behind_given_ids() -> None:
    marker = (9, 10)
    rules = FakeRules(vocab_size=VOCAB_SIZE)
    driver = Driver(rules=rules)
    for number in range(6):
        driver.add(
            f"g{number}",
            regex("[0-6]{4}", FreePart((marker, (9, 11)))),
            seed=number,
            params={"max_tokens": 50},
            stop_ids=[],
        )
    driver.add(
        "now",
        regex("[0-6]{4}", FreePart(((LETTERS.index("a") + 1,),))),
        params={
            "allowed_token_ids": (LETTERS.index("a") + 1, 0, 1),
            "max_tokens": 50,
        },
    )
    driver.run()
    for number in range(6):
        ids = driver.ids[f"g{number}"]
        found = [i for i in range(1, len(ids)) if (ids[i - 1], ids[i]) in (marker, (9, 11))]
        if found:
            assert re.fullmatch("[0-6]{0,4}", text_of(ids[found[0] + 1 :]))
        else:
            assert driver.last[f"g{number}"].finish_reason == "length"
    answer = driver.text("now")
    assert re.fullmatch("[01]*a[01]{4}", answer)


def test_choices_of_one_call_are_rows_of_their_own() -> None:
    driver = Driver()
    leader = driver.request("0", regex("[a-z]{5}-"), prompt=list(range(12)))
    for request in choices_of(leader, [Follower(str(i), i) for i in range(1, 6)]):
        driver.core.add(request)
    driver.run()
    texts = {driver.text(str(i)) for i in range(6)}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{5}-", text) for text in texts)


def test_allowed_tokens_and_grammars_hold_together() -> None:
    driver = Driver()
    digits = tuple(LETTERS.index(letter) for letter in "01")
    driver.add("both", regex("[0-6]{5}"), params={"allowed_token_ids": digits})
    driver.add("neither", regex("[a-z]{5}"), params={"allowed_token_ids": digits})
    driver.add("plain", None)
    driver.run()
    assert re.fullmatch("[01]{5}", driver.text("both"))
    failed = driver.last["neither"]
    assert (failed.finish_reason, failed.error_code) == ("error", "invalid_grammar")
    assert driver.last["plain"].finish_reason == "length"


def test_logprobs_and_penalties_come_along() -> None:
    driver = Driver()
    driver.add("g", regex("[a-z]{5}"), params={"logprobs": 2, "presence_penalty": 0.5})
    driver.run()
    assert re.fullmatch("[a-z]{5}", driver.text("g"))


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    driver = Driver()
    driver.add("bad", Grammar("start: nobody"))
    driver.add("plain", None)
    driver.add("good", regex("abc"))
    driver.run()
    assert driver.last["bad"].error_code == "invalid_grammar"
    assert driver.text("good") == "abc"
    assert driver.last["plain"].finish_reason == "length"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_mask_over_its_fuel_ends_its_request_alone(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the answer, behind what was tried when it was compiled; made in the step or
    between steps."""
    monkeypatch.setattr(matcher, "MAX_STEP_LEXER_FUEL", 600)
    monkeypatch.setattr(matcher, "MOST_LEXER_FUEL", 700)
    monkeypatch.setattr(grammar_rows, "SLOW_S", -1.0 if is_slow else math.inf)
    driver = Driver()
    costly = "|".join(f"[a-z]*{letter}[a-z]*" for letter in "abcdefghijklmnopq")
    driver.add("costly", regex("x{30}(" + costly + ")-"), params={"max_tokens": 50})
    driver.add("good", regex("[a-z]{20}"))
    driver.add("plain", None)
    driver.run()
    assert text_of(driver.ids["costly"]) == "x" * 30
    last = driver.last["costly"]
    assert (last.finish_reason, last.error_code) == ("error", "grammar_limit"), last
    assert len(driver.text("good")) == 20
    assert driver.last["plain"].finish_reason == "length"


def test_a_request_may_leave_while_its_grammar_is_compiled() -> None:
    driver = Driver()
    driver.add("gone", regex("[a-z]{20}"))
    assert driver.core.stats().num_waiting == 1
    driver.core.abort(["gone"])
    assert not driver.core.has_work
    driver.add("next", regex("abc"))
    driver.run()
    assert driver.text("next") == "abc"
    assert "gone" not in driver.last


def test_a_core_without_a_vocabulary_says_so() -> None:
    driver = Driver()
    core = EngineCore(driver.model, EngineConfig(), max_model_len=64, vocab_size=VOCAB_SIZE)
    core.add(driver.request("g", regex("abc")))
    (output,) = core.step()
    assert output.error_code == "invalid_grammar"


def test_a_table_of_tokens_that_failed_by_chance_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, num_calls = grammars.make_trie, 0

    def fail_once(words: Vocabulary) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise MemoryError
        return make(words)

    monkeypatch.setattr(grammars, "make_trie", fail_once)
    driver = Driver()
    making = driver.core._grammars._trie
    assert making is not None
    assert isinstance(making.exception(), MemoryError)
    for name in ("first", "second"):
        driver.add(name, regex("abc"))
        driver.run()
        assert driver.text(name) == "abc"
    assert num_calls == 2


@pytest.fixture(autouse=True)
def no_mask_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: forced tokens of slow rows are not looked for."""
    monkeypatch.setattr(grammar_rows, "SLOW_S", math.inf)


LITERALS = [
    '\\{"name": "[a-z]{2,4}", "age": [0-6]{2}, "done": (a|b)\\}',
    "(hello hello hello|help me if you can) [a-z]{3} the end of all",
    "abcdefgh",
    "[a-z]{3}(-abcdefg-[0-4]){3}",
]


def forced_answers(
    *, at_end: bool = False, **options: Any
) -> tuple[dict[str, list[int]], int, int]:
    """Ids of many rows, most tokens in one output, and the steps that it took."""
    driver = Driver(**options)
    for number in range(12):
        prompt = list(range(1 + number % 9))
        driver.add(
            f"g{number}",
            regex(LITERALS[number % 4]),
            seed=number,
            prompt=prompt,
            params={"max_tokens": 14 if number == 9 else 50},
            at_end=at_end,
        )
        driver.add(f"p{number}", None, seed=number, prompt=prompt, params={"max_tokens": 6})
    driver.run()
    for number in range(12):
        if number != 9:
            assert re.fullmatch(LITERALS[number % 4], driver.text(f"g{number}"))
    assert len(driver.ids["g9"]) == 14
    return dict(driver.ids), driver.longest, driver.core.stats().num_steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"blocks": 24},
        {"blocks": 24, "async_scheduling": False},
        {"max_num_batched_tokens": 8},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(None, 8))},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(6,)), "blocks": 30},
    ],
    ids=str,
)
def test_forced_tokens_are_computed_at_once_and_change_no_answer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, longest, num_steps = forced_answers(**options)
    assert longest > 6
    monkeypatch.setattr(commit, "MIN_FORCED_TOKENS", 1 << 20)
    one_by_one, longest, more_steps = forced_answers(**options)
    assert longest == 1
    assert found == one_by_one
    assert num_steps < more_steps
    at_end, longest, _ = forced_answers(at_end=True, **options)
    assert longest == max(map(len, found.values()))
    assert at_end == found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"blocks": 24},
        {"max_num_batched_tokens": 8},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(None, 8))},
    ],
    ids=str,
)
def test_slow_masks_are_made_between_steps_and_change_no_answer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _, _ = forced_answers(**options)
    monkeypatch.setattr(grammar_rows, "SLOW_S", -1.0)
    slowly, longest, _ = forced_answers(**options)
    assert longest == 1
    assert slowly == found


def test_rows_do_not_wait_for_the_mask_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()
    make = MaskFill.run

    def make_late(fill: MaskFill) -> None:
        assert made.wait(PATIENCE_S)
        make(fill)

    monkeypatch.setattr(MaskFill, "run", make_late)
    monkeypatch.setattr(grammar_rows, "SLOW_S", -1.0)
    driver = Driver()
    driver.add("slow", regex("[a-z]{9}"))
    while not driver.ids["slow"]:
        driver.step()
    for number in range(3):
        driver.add(f"plain{number}", None, seed=number)
    for _ in range(100):
        driver.step()
    assert len(driver.ids["slow"]) == 1
    assert all(driver.last[f"plain{number}"].finish_reason for number in range(3))
    assert driver.core.has_work
    made.set()
    driver.run()
    assert re.fullmatch("[a-z]{9}", driver.text("slow"))


def test_log_probabilities_and_stop_ids_keep_their_tokens() -> None:
    driver = Driver()
    letter = LETTERS.index("d") + 1
    driver.add("logprobs", regex("abcdef"), params={"logprobs": 1})
    driver.add("stop", regex("abcdef"), stop_ids=[EOS, letter])
    driver.run()
    assert driver.text("logprobs") == "abcdef"
    assert driver.text("stop") == "abcd"
    assert driver.last["stop"].stop_id == letter
