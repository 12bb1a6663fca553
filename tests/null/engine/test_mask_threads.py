"""Masks that are made on threads, some of them for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import GrammarError
from vllmx_core.plan import U32
from vllmx_engine.core import grammar_masks, grammar_rows
from vllmx_engine.core.grammar_masks import Constrained, GrammarMasks
from vllmx_engine.core.grammar_rows import MaskFill, MaskThreads
from vllmx_engine.grammar.matcher import QUICK_S, MaskPace, Matcher

from tests.waiting import PATIENCE_S, wait_until


class Matching:
    """The part of a `Matcher` that makes masks: all its words are one number."""

    def __init__(self, number: int, gate: threading.Event | None = None) -> None:
        self._number, self._gate = number, gate
        self.thread = -1

    def fill_mask(self, mask: U32) -> None:
        self.thread = threading.get_ident()
        if self._gate is not None:
            assert self._gate.wait(PATIENCE_S)
        if self._number < 0:
            raise GrammarError("over the fuel")
        mask[:] = self._number


def run_now(run: Callable[[], None]) -> None:
    run()


def fill_of(
    number: int, gate: threading.Event | None = None, *, is_quick: bool = False
) -> MaskFill:
    pace = MaskPace()
    pace.observe(0.0 if is_quick else 1.0)
    matcher: Matcher = Matching(number, gate)  # type: ignore[assignment]
    return MaskFill(matcher, 3, pace, run_now)


@pytest.fixture
def threads() -> MaskThreads:
    return MaskThreads()


@pytest.mark.parametrize("count", [1, 5, 70])
def test_masks_are_made_and_fail_each_for_itself(threads: MaskThreads, count: int) -> None:
    fills = [fill_of(-1 if number % 4 == 3 else number) for number in range(count)]
    for _ in range(2):
        threads.run(fills, lambda: PATIENCE_S)
        assert all(fill.is_done for fill in fills)
        for number, fill in enumerate(fills):
            assert isinstance(fill.error, GrammarError) == (number % 4 == 3)
            if fill.error is None:
                assert (fill.mask == np.uint32(number)).all()
            fill.renew()
            assert not fill.is_begun
    threads.close()


def test_masks_that_take_long_hold_up_no_others(threads: MaskThreads) -> None:
    """As many of them as leave one thread, and no step waits for them longer than it wants to."""
    gate = threading.Event()
    slow = [fill_of(1, gate) for _ in range(5)]
    quick = [fill_of(number) for number in range(40)]
    threads.run([*slow, *quick], lambda: 0.0)
    wait_until(lambda: all(fill.is_done for fill in quick))
    assert not any(fill.is_done for fill in slow)
    later = [fill_of(2)]
    threads.run(later, lambda: PATIENCE_S)
    assert later[0].is_done
    told: list[int] = []
    slow[0].when_done(lambda: told.append(0))
    quick[0].when_done(lambda: told.append(1))
    assert told == [1]
    gate.set()
    for fill in slow:
        fill.wait()
    wait_until(lambda: told == [1, 0])
    threads.close()


def test_nobody_asks_for_patience_where_masks_are_quick(
    threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_rows, "HELP_S", PATIENCE_S)

    def impatient() -> float:
        raise AssertionError("a prediction was made for nothing")

    threads.run([fill_of(1) for _ in range(9)], impatient)
    threads.close()


class Row:
    """What `GrammarMasks` asks of a sequence and its grammar."""

    finished, skipped_step, rules, is_free, has_ended = False, -1, None, False, False

    def __init__(self, fill: MaskFill) -> None:
        self.request_id, self.grammar, self._fill = "r", self, fill

    def next_fill(self) -> MaskFill:
        return self._fill

    def fill_mask(self, mask: U32) -> None:
        if self._fill.error is not None:
            raise self._fill.error
        mask[:] = self._fill.mask


@pytest.mark.parametrize(("num_cores", "is_shared"), [(2, False), (16, True)])
def test_quick_masks_wake_no_thread_up(
    num_cores: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made where they are wanted, while others are made elsewhere; but many of them by
    several threads, where there are cores for those."""
    monkeypatch.setattr(grammar_rows, "available_processors", lambda: num_cores)
    fills = [fill_of(number, is_quick=number % 5 > 0) for number in range(40)]
    fills[7] = fill_of(-1, is_quick=True)
    masks = np.zeros((40, 3), np.uint32)
    rows: list[Any] = [Row(fill) for fill in fills]
    constrained = [
        Constrained(index, row, mask)
        for index, (row, mask) in enumerate(zip(rows, masks, strict=True))
    ]
    filler = GrammarMasks()
    found = filler.fill(constrained, 1, lambda: PATIENCE_S, lambda _: False)
    assert not found.late
    assert [row for row, _ in found.failed] == [rows[7]]
    assert (masks[7] == 0xFFFFFFFF).all(), "of a grammar that failed"
    others = [number for number in range(40) if number != 7]
    assert (masks[others] == np.array(others)[:, None]).all()
    here = threading.get_ident()
    for number, fill in enumerate(fills):
        is_here = fill._matcher.thread == here  # type: ignore[attr-defined]
        assert is_here == (number % 5 > 0 and not is_shared)
    filler.close()


def test_a_grammar_is_doubted_for_its_own_masks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for what those before it took in the same step."""
    now_s = 0.0

    class Working(Matching):
        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def fill_mask(self, mask: U32) -> None:
            nonlocal now_s
            now_s += self._seconds

    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(thread_time=lambda: now_s))
    seconds = [0.9 * QUICK_S, 0.9 * QUICK_S, 1.1 * QUICK_S, 0.9 * QUICK_S]
    paces = [MaskPace() for _ in seconds]
    matchers: list[Any] = [Working(each) for each in seconds]
    rows: list[Any] = [
        Row(MaskFill(matcher, 3, pace, run_now))
        for matcher, pace in zip(matchers, paces, strict=True)
    ]
    filler = GrammarMasks()
    constrained = [Constrained(0, row, np.zeros(3, np.uint32)) for row in rows]
    filler.fill(constrained, 1, lambda: 0.0, lambda _: False)
    assert [pace.is_quick for pace in paces] == [True, True, False, True]
    filler.close()


def test_a_grammar_is_doubted_for_a_thousand_masks() -> None:
    pace = MaskPace()
    assert pace.is_quick
    pace.observe(0.001)
    for _ in range(1000):
        assert not pace.is_quick
        pace.observe(0.0001)
    assert pace.is_quick


def test_a_mask_is_not_renewed_while_it_is_made(threads: MaskThreads) -> None:
    gate = threading.Event()
    fill = fill_of(1, gate)
    threads.run([fill], lambda: 0.0)
    with pytest.raises(AssertionError, match="under way"):
        fill.renew()
    gate.set()
    fill.wait()
    fill.renew()
    threads.close()
