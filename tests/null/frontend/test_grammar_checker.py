"""Waiting for checks of grammars: who waits for whom; the process itself is a stand-in here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllmx_core.errors import GrammarError, QueueFullError
from vllmx_engine.link.grammar_process import MAX_CLIENT_WAITING, GrammarChecker
from vllmx_engine.wire.grammars import GrammarSpec, Verdict, Vocabulary


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


class StandIn:
    """Answers "slow" grammars when told to, refuses "bad" ones, dies of a "deadly" one, once."""

    def __init__(self) -> None:
        self.pid, self.lost = 0, False
        self.go_on = asyncio.Event()
        self.checked: list[str] = []

    async def check(self, asked: GrammarSpec) -> Verdict:
        self.checked.append(asked.text)
        if asked.text.startswith("slow"):
            await self.go_on.wait()
        if asked.text == "deadly" and self.checked.count("deadly") == 1:
            raise ConnectionError
        if asked.text == "bad":
            return Verdict(0, error="it is bad")
        return Verdict(0, f"compiled {asked.text}")

    async def close(self) -> None:
        self.lost = True


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()

    async def running(_: GrammarChecker) -> Any:
        return stand_in

    monkeypatch.setattr(GrammarChecker, "_running", running)
    return stand_in


def checker() -> GrammarChecker:
    def vocabulary() -> Vocabulary:
        raise AssertionError("nobody needs it here")

    return GrammarChecker(vocabulary)


async def test_a_client_waits_for_its_own_grammars_alone(process: StandIn) -> None:
    grammars = checker()
    held = [asyncio.ensure_future(grammars.check(spec(f"slow{i}"), "a")) for i in range(5)]
    assert await grammars.check(spec("quick"), "b") == "compiled quick"
    assert sorted(process.checked) == ["quick", "slow0"]
    process.go_on.set()
    assert await asyncio.gather(*held) == [f"compiled slow{i}" for i in range(5)]
    assert not grammars._turns


async def test_one_client_cannot_fill_the_queue(process: StandIn) -> None:
    grammars = checker()
    held = [
        asyncio.ensure_future(grammars.check(spec(f"slow{i}"), "a"))
        for i in range(MAX_CLIENT_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="of this client"):
        await grammars.check(spec("one more"), "a")
    assert await grammars.check(spec("quick"), "b") == "compiled quick"
    process.go_on.set()
    await asyncio.gather(*held)


async def test_equal_grammars_are_checked_once(process: StandIn) -> None:
    grammars = checker()
    first = asyncio.ensure_future(grammars.check(spec("slow"), "a"))
    second = asyncio.ensure_future(grammars.check(spec("slow"), "b"))
    await asyncio.sleep(0)
    first.cancel()  # who goes away takes nothing from the other
    process.go_on.set()
    assert await second == "compiled slow"
    assert await grammars.check(spec("slow")) == "compiled slow"
    for _ in range(2):
        with pytest.raises(GrammarError, match="it is bad"):
            await grammars.check(spec("bad"))
    assert process.checked == ["slow", "bad"]


async def test_a_grammar_is_asked_about_again_when_the_process_dies(process: StandIn) -> None:
    assert await checker().check(spec("deadly")) == "compiled deadly"
    assert process.checked == ["deadly", "deadly"]
