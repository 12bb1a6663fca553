"""The conversation behind `vllmx chat`, over an engine that answers from a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx.terminal_chat import Conversation
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.sampling import SamplingParams


class Stream(Iterator[str]):
    def __init__(self, pieces: list[str]) -> None:
        self._pieces = iter(pieces)
        self.token_ids: list[int] = []
        self.finish_reason = "stop"

    def __next__(self) -> str:
        piece = next(self._pieces)
        self.token_ids.append(1)
        return piece


class ScriptedEngine:
    """Answers each prompt with its number of messages; keeps what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.cancelled: list[int] = []

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[-1]["content"] == "bad":
            raise InvalidRequestError("refused")
        self.prompts.append([dict(m) for m in messages])
        return "prompt"

    def sampling_params(self, **explicit: Any) -> SamplingParams:
        return SamplingParams(**explicit)

    def generate_stream(self, params: SamplingParams, prompt: str) -> tuple[int, int, Stream]:
        self.params.append(params)
        return len(self.params), 1, Stream(["answer ", str(len(self.prompts[-1]))])

    def cancel(self, seq_id: int) -> bool:
        self.cancelled.append(seq_id)
        return True


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def talk(engine: ScriptedEngine) -> Conversation:
    return Conversation(engine, {}, "be brief", {})  # type: ignore[arg-type]


def say(talk: Conversation, text: str | None) -> str:
    return "".join(talk.answer(text))


def test_history_grows_and_can_be_taken_back(talk: Conversation, engine: ScriptedEngine) -> None:
    assert say(talk, "one") == "answer 2"
    assert say(talk, "two") == "answer 4"
    assert [m["role"] for m in engine.prompts[-1]] == ["system", "user", "assistant", "user"]
    talk.command("/undo")
    assert talk.messages[-1] == {"role": "assistant", "content": "answer 2"}
    assert talk.command("/again") == Conversation.AGAIN
    assert say(talk, None) == "answer 2"
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_an_interrupted_answer_stays_and_its_sequence_is_cancelled(
    talk: Conversation, engine: ScriptedEngine
) -> None:
    pieces = talk.answer("one")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talk.messages[-1] == {"role": "assistant", "content": "answer "}
    assert engine.cancelled == [1]


def test_a_refused_question_leaves_no_trace(talk: Conversation) -> None:
    with pytest.raises(InvalidRequestError):
        say(talk, "bad")
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_set_checks_before_it_changes(talk: Conversation, engine: ScriptedEngine) -> None:
    assert talk.command("/set temperature 0.5") == "temperature = 0.5"
    with pytest.raises(InvalidRequestError):
        talk.command("/set temperature -3")
    with pytest.raises(ConfigError, match="no sampling parameter 'heat'"):
        talk.command("/set heat 1")
    say(talk, "one")
    assert engine.params[-1].temperature == 0.5
    talk.command("/set temperature none")
    say(talk, "two")
    assert engine.params[-1].temperature == 1.0


def test_save_and_load(talk: Conversation, tmp_path: Path) -> None:
    say(talk, "one")
    before = list(talk.messages)
    talk.command(f"/save {tmp_path / 'talk.json'}")
    talk.command("/system other")
    talk.command(f"/load {tmp_path / 'talk.json'}")
    assert talk.messages == before
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a conversation"):
        talk.command(f"/load {tmp_path / 'bad.json'}")
    with pytest.raises(ConfigError, match="cannot read"):
        talk.command(f"/load {tmp_path / 'none.json'}")


def test_unknown_commands_and_leaving(talk: Conversation) -> None:
    with pytest.raises(ConfigError, match="/help"):
        talk.command("/frobnicate")
    assert talk.command("/quit") is None
    assert "/undo" in (talk.command("/help") or "")
    with pytest.raises(ConfigError, match=r"unknown command /rest; did you mean 'reset'\?"):
        talk.command("/rest")
    with pytest.raises(ConfigError, match=r"'temprature'; did you mean 'temperature'\?"):
        talk.command("/set temprature 1")
