"""The loop around a core whose frontend does not take its updates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core import commit
from vllmx_engine.core.core_loop import CoreLoop, Inbox
from vllmx_engine.wire.ipc import AddRequest, FromCore, Outputs, Ping, Pong, Shutdown
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, is_piece, pack_ids

from tests.waiting import PATIENCE_S

from .harness import QUIET, Harness


def request(name: str, prompt: Sequence[int] = (1, 2), **fields: int) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=20, **fields)  # type: ignore[arg-type]
    return AddRequest(
        CoreRequest(request_id=name, prompt=pack_ids(prompt), params=params, max_tokens=20, seed=0)
    )


class Frontend:
    """Takes `room` messages with updates, and tells of those that are too many."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.outputs: list[CoreOutput] = []
        self.pongs = 0
        self.ended = threading.Event()

    def take(self, message: FromCore) -> bool:
        self.pongs += isinstance(message, Pong)
        if not isinstance(message, Outputs):
            return True
        self.outputs += message.outputs
        self.room -= 1
        if any(output.finish_reason for output in message.outputs):
            self.ended.set()
        return self.room >= 0


def test_requests_whose_news_nobody_takes_are_ended_and_the_core_goes_on() -> None:
    harness, frontend = Harness(rules=QUIET), Frontend(room=3)
    inbox: Inbox = SimpleQueue()
    loop = CoreLoop(harness.core, inbox, frontend.take, lambda error: None)
    thread = threading.Thread(target=loop.run)
    for name in ("one", "two"):
        inbox.put(request(name))
    thread.start()
    assert frontend.ended.wait(PATIENCE_S)
    last = {output.request_id: output for output in frontend.outputs}
    for name in ("one", "two"):
        assert last[name].finish_reason == "error"
        assert last[name].error_code == "engine_unavailable"
        assert "did not take" in (last[name].error or "")
    frontend.room = 1000
    frontend.ended.clear()
    inbox.put(Ping())
    inbox.put(request("three"))
    assert frontend.ended.wait(PATIENCE_S)
    assert frontend.outputs[-1].finish_reason == "length"
    assert frontend.pongs == 1
    inbox.put(Shutdown())
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_each_piece_of_a_prompts_logprobs_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request only generates, whose updates are not held back."""
    monkeypatch.setattr(commit, "_PIECE_LOGPROBS", 4)
    harness = Harness(rules=QUIET)
    inbox: Inbox = SimpleQueue()
    messages: list[list[CoreOutput]] = []

    def take(message: FromCore) -> bool:
        if isinstance(message, Outputs):
            messages.append(message.outputs)
            done = sum(output.finish_reason is not None for group in messages for output in group)
            if done == 2:
                inbox.put(Shutdown())
        return True

    inbox.put(request("plain"))
    inbox.put(request("scored", range(20), prompt_logprobs=1))
    CoreLoop(harness.core, inbox, take, lambda error: None).run()
    pieces = [group for group in messages if any(map(is_piece, group))]
    assert [len(group) for group in pieces] == [1] * 10
    assert [len(output.prompt_logprobs or []) for (output,) in pieces] == [2] * 9 + [1]
    outputs = [output for group in messages for output in group]
    for name in ("plain", "scored"):
        assert sum(len(output.ids) for output in outputs if output.request_id == name) == 20
