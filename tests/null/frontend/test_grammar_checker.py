"""Waiting for checks of grammars: who waits for whom; the process itself is a stand-in here."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import GrammarCheckError, GrammarError, QueueFullError
from vllmx_core.sampling import SamplingParams
from vllmx_core.structured import StructuredOutputsParams
from vllmx_engine.link import grammar_process
from vllmx_engine.link.grammar_process import (
    MAX_CLIENT_WAITING,
    GrammarChecker,
    GrammarProcess,
    Refusal,
)
from vllmx_engine.wire.grammars import (
    CheckGrammar,
    GrammarSpec,
    ToGrammars,
    Verdict,
    Vocabulary,
    to_grammars_decoder,
)
from vllmx_engine.wire.ipc import FrameReader, encode_frame

WORDS = Vocabulary(tokens=[b"a"], special_ids=[], eos_ids=[], tokenizer="{}")


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


class StandIn:
    """Answers "slow" grammars when told to, refuses "bad" ones, dies of a "deadly" one, once, and
    of a "cursed" one twice; a "busy" one is not answered the first time."""

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
        if asked.text == "cursed" and self.checked.count("cursed") < 3:
            raise ConnectionError
        if asked.text == "busy" and self.checked.count("busy") == 1:
            raise GrammarCheckError("the machine is busy")
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


class Observer:
    """Counts refusals."""

    def __init__(self) -> None:
        self.refused: list[Refusal] = []

    def grammar_compiled(self, seconds: float) -> None:
        pass

    def grammar_refused(self, why: Refusal) -> None:
        self.refused.append(why)


@pytest.mark.parametrize(("text", "said"), [("busy", "is busy"), ("cursed", "died 2 times")])
async def test_a_check_without_a_verdict_is_no_refusal_and_is_not_kept(
    process: StandIn, text: str, said: str
) -> None:
    grammars = checker()
    grammars.observer = observer = Observer()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=text))
    with pytest.raises(GrammarCheckError, match=said) as caught:
        await grammars.checked(params)
    assert (caught.value.http_status, caught.value.retry_after_s) == (503, 5.0)
    assert not isinstance(caught.value, GrammarError)
    assert observer.refused == ["overloaded"]
    assert await grammars.check(spec(text)) == f"compiled {text}"


async def test_a_vocabulary_that_failed_by_chance_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[BaseException] = [MemoryError(), GrammarError("no fixed text for each token")]
    num_calls = 0

    def vocabulary() -> Vocabulary:
        nonlocal num_calls
        num_calls += 1
        raise errors[num_calls - 1]

    grammars = GrammarChecker(vocabulary)
    with pytest.raises(MemoryError):
        await grammars.check(spec("a"))
    for _ in range(3):  # a tokenizer does not change
        with pytest.raises(GrammarError, match="no fixed text"):
            await grammars.check(spec("a"))
    assert num_calls == 2
    assert not await grammars.prepare()
    await grammars.close()


class Scripted:
    """What stands in for the process itself: answers checks as `answer` says, None: not at all."""

    pid = 0

    def __init__(self, path: Path, answer: Callable[[CheckGrammar], Verdict | None]) -> None:
        self._answer = answer
        self._status: int | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        loop, frames = asyncio.get_running_loop(), FrameReader[ToGrammars](to_grammars_decoder)
        while data := await loop.sock_recv(self._socket, 1 << 16):
            for message in frames.feed(data):
                if isinstance(message, CheckGrammar):
                    verdict = self._answer(message)
                    if verdict is not None:
                        await loop.sock_sendall(self._socket, encode_frame(verdict))

    def poll(self) -> int | None:
        return self._status

    def kill(self) -> None:
        self._status = -9
        self._task.cancel()
        self._socket.close()

    def wait(self) -> None:
        pass


async def started(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[CheckGrammar], Verdict | None]
) -> GrammarProcess:
    monkeypatch.setattr(grammar_process, "spawn", lambda path, _: Scripted(path, answer))
    return await GrammarProcess.start(WORDS)


async def test_an_open_verdict_is_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await started(
        monkeypatch, lambda asked: Verdict(asked.call_id, error="no time", is_open=True)
    )
    with pytest.raises(GrammarCheckError, match="no time"):
        await process.check(spec("a"))
    assert not process.lost
    await process.close()


async def test_a_process_that_answers_nobody_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "ANSWER_S", 0.05)
    process = await started(monkeypatch, lambda _: None)
    with pytest.raises(GrammarCheckError, match=r"within 0\.05 s"):
        await process.check(spec("a"))
    assert process.lost
    await process.close()


async def test_a_process_that_answers_others_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    time_is_up = asyncio.Event()

    async def until_time_is_up(call: asyncio.Future[Verdict], seconds: float) -> Verdict:
        await asyncio.wait(
            [call, asyncio.ensure_future(time_is_up.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        if not call.done():
            raise TimeoutError
        return call.result()

    process = await started(
        monkeypatch,
        lambda asked: Verdict(asked.call_id, "fine") if asked.spec.text == "quick" else None,
    )
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "wait_for", until_time_is_up)
        waiting = asyncio.ensure_future(process.check(spec("held up")))
        await asyncio.sleep(0)
        assert (await process.check(spec("quick"))).text == "fine"
        time_is_up.set()
        with pytest.raises(GrammarCheckError):
            await waiting
    assert not process.lost
    await process.close()
