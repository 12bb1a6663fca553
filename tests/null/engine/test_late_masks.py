"""Rows whose masks are not there in time: they alone sit out, and say what they would have said."""

from __future__ import annotations

import math
import random
import re
import threading
from typing import Any

import pytest
from vllmx_core.errors import GrammarError
from vllmx_engine.core import grammar_rows
from vllmx_engine.core.prefixes import Prefixes
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.wire.messages import Follower, choices_of
from vllmx_testing.fake import FakeRules

from tests.held_masks import Hold, held
from tests.waiting import PATIENCE_S

from .grammar_driver import VOCAB_SIZE, Driver, regex

STATES = FakeRules(vocab_size=VOCAB_SIZE, has_states=True)
DIGITS, WORDS = "[0-6]{9}", "[a-z]{2,9}-[a-z]{9}"


@pytest.fixture(autouse=True)
def no_mask_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: this is about masks that are not known to be slow."""
    monkeypatch.setattr(grammar_rows, "SLOW_S", math.inf)


@pytest.fixture
def taken_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were late."""
    rows: list[int] = []
    take_back = RowTable.take_back

    def noted(table: RowTable, row: int, token: int) -> None:
        rows.append(row)
        take_back(table, row, token)

    monkeypatch.setattr(RowTable, "take_back", noted)
    return rows


@pytest.fixture(autouse=True)
def no_cached_block_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prefix cache has of a late row ends before the token that is taken back."""
    file = Prefixes.file

    def checked(prefixes: Prefixes, sequence: Sequence, length: int) -> None:
        assert length <= prefixes._table.computed[sequence.row]
        file(prefixes, sequence, length)

    monkeypatch.setattr(Prefixes, "file", checked)


def begin(driver: Driver, name: str, hold: Hold, pattern: str = WORDS, **fields: Any) -> None:
    """Adds a request whose masks are held up, and runs it to its first token, which needs none."""
    with held(hold):
        driver.add(name, regex(pattern), **fields)
        while not driver.ids[name]:
            driver.step()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_wait_for_a_mask_that_is_late(overlap: bool, temperature: float) -> None:
    params = {"temperature": temperature}
    alone = Driver(async_scheduling=overlap)
    alone.add("late", regex(WORDS), params=params)
    alone.run()

    made = threading.Event()
    driver = Driver(async_scheduling=overlap)
    begin(driver, "late", lambda: _wait(made), params=params)
    for number in range(3):
        driver.add(f"plain{number}", None, seed=number)
        driver.add(f"digits{number}", regex(DIGITS), seed=number)
    others = [f"{kind}{number}" for kind in ("plain", "digits") for number in range(3)]
    for _ in range(20_000):
        if all(name in driver.last and driver.last[name].finish_reason for name in others):
            break
        driver.step()
    assert all(re.fullmatch(DIGITS, driver.text(f"digits{number}")) for number in range(3))
    assert driver.ids["late"] == alone.ids["late"][:1]
    made.set()
    driver.run()
    assert driver.ids["late"] == alone.ids["late"]


def _wait(made: threading.Event) -> None:
    assert made.wait(PATIENCE_S)


class Turnstile:
    """Holds some masks until the step that waits for them has gone on, or for so long."""

    def __init__(self, driver: Driver, longest_s: float) -> None:
        self._longest_s = longest_s
        self._passed = threading.Condition()
        self._num_steps = 0
        self._rng = random.Random(4)
        self._driver = driver

    def hold(self) -> None:
        """Every third mask is late."""
        with self._passed:
            turn = self._num_steps
            if self._rng.randrange(3) == 0:
                self._passed.wait_for(lambda: self._num_steps > turn, self._longest_s)

    def run(self) -> None:
        """Runs the driver to its end."""
        states = self._driver.core._scheduler.states
        for _ in range(20_000):
            if not self._driver.core.has_work:
                return
            self._driver.step()
            if states is not None:
                states.check()
            with self._passed:
                self._num_steps += 1
                self._passed.notify_all()
        raise AssertionError("it does not end")


PATTERNS = [
    '\\{"name": "[a-z]{2,4}", "age": [0-6]{2}, "done": (a|b)\\}',
    "[a-z]{3}(-abcdefg-[0-4]){2}",
    "[a-z ]{5,9}",
]


def answers(*, late: bool, **options: Any) -> Driver:
    """Many rows of all kinds, with masks that are late now and then."""
    driver = Driver(**options)
    has_states = driver.model.rules.has_states  # behind chunks a step must wait for their masks
    turnstile = Turnstile(driver, 0.02 if has_states else PATIENCE_S)
    with held(turnstile.hold if late else lambda: None):
        for number in range(9):
            asked: dict[str, Any] = {"max_tokens": 40}
            if number % 3 == 2:
                asked |= {"logprobs": 2, "presence_penalty": 0.5, "min_tokens": 6}
            fields = {"seed": number, "prompt": list(range(1 + number)), "params": asked}
            driver.add(f"g{number}", regex(PATTERNS[number % 3]), **fields)
            asked = {"max_tokens": 9, "temperature": number % 2}
            driver.add(f"p{number}", None, seed=number, params=asked)
        leader = driver.request("c0", regex(WORDS), prompt=list(range(12)))
        for request in choices_of(leader, [Follower(f"c{i}", i) for i in range(1, 4)]):
            driver.core.add(request)
        turnstile.run()
    return driver


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"blocks": 24},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"stages": 3},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(None, 8))},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(6,)), "blocks": 30},
        {"rules": FakeRules(vocab_size=VOCAB_SIZE, windows=(6,)), "async_scheduling": False},
        {"rules": STATES},
        {"rules": STATES, "async_scheduling": False},
        {"rules": STATES, "blocks": 24, "state_snapshot_tokens": 1},
        {"rules": STATES, "enable_prefix_caching": False, "slots": 30},
        {"rules": STATES, "stages": 3},
    ],
    ids=str,
)
def test_late_masks_change_no_answer(options: dict[str, Any], taken_back: list[int]) -> None:
    in_time = answers(late=False, **options)
    taken_back.clear()
    late = answers(late=True, **options)
    assert len(taken_back) > 5
    assert late.ids == in_time.ids
    assert late.logprobs == in_time.logprobs
    stats = late.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_a_late_request_may_leave() -> None:
    made = threading.Event()
    driver = Driver()
    begin(driver, "gone", lambda: _wait(made))
    driver.add("plain", None)
    driver.step()
    driver.core.abort(["gone"])
    driver.run()
    assert driver.last["plain"].finish_reason == "length"
    assert len(driver.ids["gone"]) == 1
    made.set()
    driver.add("next", regex(DIGITS))
    driver.run()
    assert re.fullmatch(DIGITS, driver.text("next"))
    assert driver.last["gone"].finish_reason is None


def test_a_late_mask_over_its_fuel_ends_its_request_alone() -> None:
    made = threading.Event()

    def fail() -> None:
        _wait(made)
        raise GrammarError("over the fuel")

    driver = Driver()
    begin(driver, "costly", fail)
    driver.add("plain", None)
    driver.add("digits", regex(DIGITS))
    while not driver.ids["digits"]:
        driver.step()
    made.set()
    driver.run()
    last = driver.last["costly"]
    assert (last.finish_reason, last.error_code) == ("error", "invalid_grammar")
    assert len(driver.ids["costly"]) == 1
    assert driver.last["plain"].finish_reason == "length"
    assert re.fullmatch(DIGITS, driver.text("digits"))
