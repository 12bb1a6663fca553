"""The short way of a chunk to the transport: taken where it may be, with the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_server.direct_body import DirectBody

from .conftest import MakeServer, Served, events_of, request_bytes

BODY = {"prompt": "hello", "max_tokens": 20, "seed": 1}


def texts(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"] for event in events if event != "[DONE]"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `write` said to each chunk."""
    answers: list[bool] = []
    write = DirectBody.write

    def recorded(self: DirectBody, data: bytes) -> bool:
        answers.append(write(self, data))
        return answers[-1]

    monkeypatch.setattr(DirectBody, "write", recorded)
    return answers


async def test_the_installed_hypercorn_lets_chunks_through(
    make_server: MakeServer, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server(step_s=0.005) as served:
        short = await served.events("/v1/completions", **BODY)
        assert len(taken) > 0  # how many tokens came together is up to the machine
        assert all(taken)
        monkeypatch.setattr(DirectBody, "of", lambda send: None)
        usual = await served.events("/v1/completions", **BODY)
    assert "".join(texts(short)) == "".join(texts(usual)) != ""


async def test_an_old_client_gets_no_chunks(served: Served, taken: list[bool]) -> None:
    """HTTP/1.0 has no chunked bodies: they end with the connection."""
    expected = await served.events("/v1/completions", **BODY)
    taken.clear()
    reader, writer = await served.connect()
    request = request_bytes("/v1/completions", {**BODY, "stream": True})
    writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert not taken
    assert "".join(texts(events_of(body.decode()))) == "".join(texts(expected))
    assert b"\r\n" not in body


@pytest.mark.parametrize("send", [print, [].append, object()])
def test_other_servers_are_left_alone(send: Any) -> None:
    assert DirectBody.of(send) is None
