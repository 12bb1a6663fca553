"""Releases of hypercorn whose inside nobody has tested: their public interface serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from vllmx_server.host import process as running
from vllmx_server.http.connections import plain, serving, versions
from vllmx_server.http.direct_body import DirectBody

from .conftest import MakeServer
from .test_direct_body import BODY, ROUTES, told

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Patches with which `versions` reads again what is installed."""
    versions.untested.cache_clear()
    yield monkeypatch
    versions.untested.cache_clear()


@pytest.mark.parametrize("found", ["0.17.3", "0.19.0", "1.0rc1"])
def test_what_is_off_is_said_in_one_sentence(
    installed: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    assert running.way_to_serve() is serving.serve
    assert not caplog.messages
    versions.untested.cache_clear()
    installed.setattr(versions, "version", lambda _: found)
    assert running.way_to_serve() is plain.serve
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"hypercorn {found} is installed" in record.message
    assert "are off: pip install 'hypercorn>=0.18,<0.19'" in record.message


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_answers_are_the_same(
    make_server: MakeServer,
    installed: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
) -> None:
    async with make_server() as served:
        expected = told(await served.events(path, **body))
    versions.untested.cache_clear()
    installed.setattr(versions, "version", lambda _: "0.19.0")
    installed.setattr(DirectBody, "write", None)
    async with make_server(serve=plain.serve) as served:
        assert told(await served.events(path, **body)) == expected
        refused = await served.post("/v1/completions", prompt="a", temperature=-1)
        assert refused.status_code == 400
        assert refused.headers["x-content-type-options"] == "nosniff"
        assert served.state.admission.in_flight == 0


async def test_a_client_that_leaves_ends_its_request(
    make_server: MakeServer, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(versions, "version", lambda _: "0.19.0")
    async with make_server(serve=plain.serve, step_s=0.005) as served:
        request = {**BODY, "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with served.client.stream("POST", "/v1/completions", json=request) as answer:
            await anext(answer.aiter_lines())
        await served.becomes_idle()


async def test_tls_and_what_is_no_request(
    make_server: MakeServer, certificate: tuple[str, str]
) -> None:
    flags = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    async with make_server(flags, serve=plain.serve) as served:
        assert (await served.post("/v1/chat/completions", **CHAT)).status_code == 200
    async with make_server(serve=plain.serve) as served:
        headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        key = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
        asked = await served.client.get("/health", headers={**headers, **key})
        assert asked.status_code < 500
        reader, writer = await served.connect()
        writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
