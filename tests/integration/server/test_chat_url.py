"""`vllmx chat --url`: a chat with a running server."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllmx.terminal.conversation import Conversation
from vllmx.terminal.remote import RemoteModel
from vllmx.terminal.rounds import Thought
from vllmx_core.errors import ConfigError, ContextLengthError, InvalidRequestError

from tests import forked
from tests.http_servers import serving

from .conftest import RunningServer


def test_a_chat_with_a_server_answers_as_one_in_this_process(
    server: RunningServer, tmp_path: Path
) -> None:
    script = "Tell me a story about a fox.\n/again\n/speculate twin\n/show\n/quit\n"
    command = ("chat", "--temperature", "0", "--max-tokens", "12")
    outputs = [forked.run(*command, *extra, stdin=script) for extra in (["--url", server.url], [])]
    for done in outputs:
        assert done.returncode == 0, done.stderr
    there, here = (done.stdout.split("assistant: ")[1].splitlines()[0] for done in outputs)
    assert there == here
    assert outputs[0].stdout.startswith(f"demo at {server.url}.")
    assert outputs[0].stdout.count("12 tokens, ") == 2
    assert "start it with --speculate" in outputs[0].stdout


def test_refusals_of_a_server_are_shown(server: RunningServer) -> None:
    with pytest.raises(ConfigError, match="does not serve other: it serves demo"):
        RemoteModel(server.url, None, "other", {})
    with pytest.raises(ConfigError, match="start `vllmx serve`, or check --url"):
        RemoteModel("http://127.0.0.1:9", None, None, {})
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteModel("127.0.0.1:8000", None, None, {})
    talk = Conversation(RemoteModel(f"{server.url}/v1/", None, None, {}), {}, None)
    with pytest.raises(ContextLengthError, match="/undo takes back the last question"):
        list(talk.answer("word " * 5000))
    assert talk.messages == []
    with pytest.raises(InvalidRequestError, match="temperature"):
        talk.command("/set temperature -1")


class Gone(BaseHTTPRequestHandler):
    """Thinks, says a word, and ends the connection."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(json.loads(body))
        deltas = ({"reasoning_content": "hm"}, {"content": "Yes"})
        events = [json.dumps({"choices": [{"index": 0, "delta": each}]}) for each in deltas]
        self._send("".join(f"data: {each}\n\n" for each in events).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""


def test_a_server_that_goes_away_is_named_and_the_question_can_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with serving(Gone) as port:
        model = RemoteModel(f"http://127.0.0.1:{port}", "key", None, {"enable_thinking": False})
        talk = Conversation(model, {"seed": 3}, "be brief")
        pieces = []
        with pytest.raises(InvalidRequestError, match="the server ended the answer"):
            pieces.extend(talk.answer("Is it?"))
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    (body,) = Gone.bodies
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["seed"] == 3
    assert "max_tokens" not in body
    assert not pieces or isinstance(pieces[0], Thought)
