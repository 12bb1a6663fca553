"""The conversation behind `vllmx chat`, over an engine that answers from a script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from vllmx.cli.chat import _coloured
from vllmx.terminal.conversation import Conversation
from vllmx.terminal.markdown import Markdown
from vllmx.terminal.rounds import Aside, Messages, Thought, shown
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.formats.events import ContentPiece, ReadAnswer, ReasoningPiece
from vllmx_engine.wire.outputs import ToolCall

from tests.http_servers import serving


class ScriptedRound:
    """An answer in two pieces, behind thoughts if it has any."""

    def __init__(self, text: str, thoughts: str, closed: list[str]) -> None:
        self._pieces, self._thoughts, self._closed = ["answer ", text], thoughts, closed
        self.found = ReadAnswer()
        self.num_tokens = 0
        self.is_cut = False

    def pieces(self) -> Iterator[str]:
        if self._thoughts:
            yield from shown(self.found, [ReasoningPiece(self._thoughts)])
        for piece in self._pieces:
            self.num_tokens += 1
            yield from shown(self.found, [ContentPiece(piece)])

    def calls(self) -> list[ToolCall]:
        return []

    def close(self) -> None:
        self._closed.append(self.found.content)


class ScriptedModel:
    """Answers each prompt with its number of messages; keeps what it was asked."""

    title = "scripted"

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, Any]]] = []
        self.sampling: list[dict[str, Any]] = []
        self.closed: list[str] = []
        self.thoughts = ""

    def begin(
        self, messages: Messages, sampling: dict[str, Any], functions: Messages
    ) -> ScriptedRound:
        if messages[-1]["content"] == "bad":
            raise InvalidRequestError("refused")
        self.prompts.append([dict(m) for m in messages])
        self.sampling.append(sampling)
        return ScriptedRound(str(len(messages)), self.thoughts, self.closed)

    def check(self, sampling: dict[str, Any]) -> None:
        SamplingParams(**sampling)

    def speculate(self, drafter: str) -> str:
        return f"drafts by {drafter}"

    def close(self) -> None: ...


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def talk(model: ScriptedModel) -> Conversation:
    return Conversation(model, {}, "be brief")


def say(talk: Conversation, text: str | None) -> str:
    return "".join(talk.answer(text))


def test_history_grows_and_can_be_taken_back(talk: Conversation, model: ScriptedModel) -> None:
    assert say(talk, "one") == "answer 2"
    assert say(talk, "two") == "answer 4"
    assert [m["role"] for m in model.prompts[-1]] == ["system", "user", "assistant", "user"]
    talk.command("/undo")
    assert talk.messages[-1] == {"role": "assistant", "content": "answer 2"}
    assert talk.command("/again") == Conversation.AGAIN
    assert say(talk, None) == "answer 2"
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_an_interrupted_answer_stays_and_its_sequence_is_cancelled(
    talk: Conversation, model: ScriptedModel
) -> None:
    pieces = talk.answer("one")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talk.messages[-1] == {"role": "assistant", "content": "answer "}
    assert model.closed == ["answer "]


def test_a_refused_question_leaves_no_trace(talk: Conversation) -> None:
    with pytest.raises(InvalidRequestError):
        say(talk, "bad")
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_set_checks_before_it_changes(talk: Conversation, model: ScriptedModel) -> None:
    assert talk.command("/set temperature 0.5") == "temperature = 0.5"
    with pytest.raises(InvalidRequestError):
        talk.command("/set temperature -3")
    with pytest.raises(ConfigError, match="no sampling parameter 'heat'"):
        talk.command("/set heat 1")
    say(talk, "one")
    assert model.sampling[-1]["temperature"] == 0.5
    talk.command("/set temperature none")
    say(talk, "two")
    assert "temperature" not in model.sampling[-1]


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


def test_thoughts_are_kept_apart(talk: Conversation, model: ScriptedModel) -> None:
    model.thoughts = "hm"
    pieces = list(talk.answer("one"))
    assert isinstance(pieces[0], Thought)
    assert talk.messages[-1]["content"] == "answer 2"
    assert talk.command("/thoughts") == "hm"
    model.thoughts = ""
    say(talk, "two")
    assert talk.command("/thoughts") == "the last answer had no thoughts"


def test_files_go_with_the_next_question(
    talk: Conversation, model: ScriptedModel, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("a note")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    talk.command(f"/file {tmp_path / 'note.txt'}")
    talk.messages.append({"role": "user", "content": "bad"})
    with pytest.raises(InvalidRequestError):
        say(talk, None)
    say(talk, "read it")
    assert model.prompts[-1][-1]["content"] == f"{tmp_path / 'note.txt'}:\na note\n\nread it"
    say(talk, "again")
    assert model.prompts[-1][-1]["content"] == "again"
    assert "2 attached" not in (talk.command(f"/image {tmp_path / 'a.png'}") or "")
    say(talk, "see it")
    image, text = model.prompts[-1][-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert text == {"type": "text", "text": "see it"}
    assert "user: [image] see it" in (talk.command("/show") or "")


def test_what_cannot_be_attached_is_said(talk: Conversation, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(10 << 30)  # 10 GB, of which none is on the disk
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for command, reason in (
        (f"/file {tmp_path / 'big'}", r"more than 4\.0 MiB"),
        (f"/file {tmp_path / 'binary'}", "is not UTF-8 text"),
        (f"/file {tmp_path / 'none'}", "cannot read"),
        (f"/file {tmp_path}", "cannot read"),
        ("/file", "name a file"),
        ("/image a.txt", "is not the name of an image"),
        ("/url file:///etc/passwd", "begins with http"),
        ("/url http://127.0.0.1:9/", "cannot be fetched"),
        ("/tools", "start the chat with --mcp"),
    ):
        with pytest.raises(ConfigError, match=reason):
            talk.command(command)


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<html><head><title>x</title></head><body><p>A  fox</p><script>1</script>&lt;b&gt;"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""


def test_the_text_of_a_page_is_attached(
    talk: Conversation, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with serving(Pages) as port:
        talk.command(f"/url http://127.0.0.1:{port}/")
    say(talk, "what is it?")
    assert model.prompts[-1][-1]["content"].endswith("\nA fox\n<b>\n\nwhat is it?")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_markdown_is_coloured_and_its_text_stays(size: int) -> None:
    text = "# Fox\nA **red** `fox` says `**`.\n```python\nx = 2**3 # no\n```\nEnd **bold**"
    markdown = Markdown()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown_text = "".join(map(markdown.push, pieces)) + markdown.finish()
    assert re.sub(r"\x1b\[[\d;]*m", "", shown_text) == text
    assert "\x1b[1m**red**\x1b[0m" in shown_text
    assert "\x1b[36m`" in shown_text
    assert shown_text.endswith("\x1b[0m")


def test_thoughts_are_folded_into_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [Thought("let me"), Thought(" see"), "Yes", Aside("< 21"), Thought("so")]
    text = "".join(_coloured(iter(pieces)))
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    folded = r"thinking \.\.\. for \d+\.\d s \(/thoughts shows them\)\n"
    assert re.fullmatch(f"{folded}Yes< 21{folded}", plain)
