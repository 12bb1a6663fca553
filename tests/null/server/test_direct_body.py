"""The short way of a chunk to the transport: taken where it may be, with the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_engine.client.request_stream import RequestStream
from vllmx_server.apis.completions.routes import CompletionAnswer
from vllmx_server.http.event_stream import DirectBody

from .conftest import MakeServer, Served, events_of, request_bytes

BODY = {"prompt": "hello", "max_tokens": 20, "seed": 1}


def texts(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"] for event in events if event != "[DONE]"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What `write` was given."""
    chunks: list[bytes] = []
    write = DirectBody.write

    def recorded(self: DirectBody, data: bytes) -> None:
        chunks.append(data)
        write(self, data)

    monkeypatch.setattr(DirectBody, "write", recorded)
    return chunks


@pytest.fixture
def diverted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that went to the connection without waking a task."""
    texts: list[str] = []
    divert = RequestStream.divert

    def watched(self: RequestStream, sink: Any) -> None:
        take = sink.take

        class Watched:
            is_ready = sink.is_ready

            def take(self, text: str, ids: list[int], now_s: float) -> None:
                texts.append(text)
                take(text, ids, now_s)

        divert(self, Watched())

    monkeypatch.setattr(RequestStream, "divert", watched)
    return texts


@pytest.mark.usefixtures("paced_steps")
async def test_the_installed_hypercorn_lets_chunks_through(
    make_server: MakeServer, taken: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server(step_s=3600.0) as served:
        short = await served.events("/v1/completions", **BODY)
        assert taken
        monkeypatch.setattr(DirectBody, "of", lambda send: None)
        usual = await served.events("/v1/completions", **BODY)
    assert "".join(texts(short)) == "".join(texts(usual)) != ""


async def test_an_old_client_gets_no_chunks(served: Served, taken: list[bytes]) -> None:
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


CHAT = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
ROUTES = [
    ("/v1/completions", {**BODY, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 20, "stream_options": {"include_usage": True}}),
    ("/v1/messages", {**CHAT, "max_tokens": 20, "ignore_eos": True}),
    ("/v1/responses", {"input": "hi", "seed": 1, "max_output_tokens": 20, "ignore_eos": True}),
]


def told(events: list[Any]) -> tuple[str, list[Any]]:
    """The text of a stream and its usage, in any of the APIs."""
    found, usages = "", []
    for event in events:
        if event == "[DONE]":
            continue
        delta = event.get("delta") or (event.get("choices") or [{}])[0]
        delta = delta.get("delta", delta) if isinstance(delta, dict) else {"text": delta}
        found += delta.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        usages.append(event.get("usage") or event.get("response", {}).get("usage"))
    return found, [usage for usage in usages if usage]


@pytest.mark.usefixtures("paced_steps")
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_tokens_go_to_the_connection_at_once(
    make_server: MakeServer,
    diverted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """The answer is the same as by way of a task."""
    async with make_server(engine={"enable_prefix_caching": False}, step_s=3600.0) as served:
        short = await served.events(path, **body)
        assert diverted
        monkeypatch.setattr(RequestStream, "divert", lambda self, sink: None)
        diverted.clear()
        usual = await served.events(path, **body)
        assert not diverted
        metrics = await served.metrics()
    assert told(short) == told(usual)
    assert len(told(usual)[0]) > 5
    assert metrics["vllmx:inter_token_latency_seconds_count"] == 2 * 19


@pytest.mark.usefixtures("paced_steps")
async def test_what_cannot_be_made_ends_that_stream_alone(
    make_server: MakeServer, diverted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: CompletionAnswer, text: str, ids: list[int]) -> bytes:
        raise RuntimeError("secret")

    async with make_server(step_s=3600.0) as served:
        with monkeypatch.context() as patch:
            patch.setattr(CompletionAnswer, "middle", broken)
            events = await served.events("/v1/completions", **BODY)
        assert diverted
        assert events[-2]["error"]["type"] == "internal_error"
        assert "secret" not in str(events)
        assert len(await served.events("/v1/completions", **BODY)) > 2
        await served.becomes_idle()


@pytest.mark.parametrize("send", [print, [].append, object()])
def test_other_servers_are_left_alone(send: Any) -> None:
    assert DirectBody.of(send) is None
