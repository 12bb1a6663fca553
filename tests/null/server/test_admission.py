"""What is refused before a body is read, what is held of bodies, and work for clients that left."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from vllmx_core.errors import QueueFullError
from vllmx_engine.client import request_limits
from vllmx_engine.text.text_threads import Stopped
from vllmx_server.errors import OverloadedError
from vllmx_server.limits.admission import _FREE_BYTES, BodyBudget

from tests.waiting import PATIENCE_S, until

from .conftest import JSON, MakeServer, Served, request_bytes

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


def without_body(path: str) -> bytes:
    return request_bytes(path, {"prompt": "a"}).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("server", "engine", "status"),
    [
        ({"max_concurrent_requests": 1}, {}, b"503"),
        ({}, {"max_num_seqs": 1, "max_queue": 1}, b"429"),
    ],
)
async def test_a_request_is_refused_before_its_body(
    make_server: MakeServer, server: dict[str, Any], engine: dict[str, Any], status: bytes
) -> None:
    async with make_server(server, engine, step_s=0.01) as served:
        running = asyncio.ensure_future(served.complete(["a", "b"], max_tokens=400))
        await until(lambda: served.llm.num_in_flight == 2)
        reader, writer = await served.connect()
        writer.write(without_body("/v1/completions"))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"retry-after" in head.lower()
        running.cancel()


async def test_a_slow_body_holds_no_place(make_server: MakeServer) -> None:
    async with make_server({"max_concurrent_requests": 1}) as served:
        _, writer = await served.connect()
        writer.write(without_body("/v1/completions"))
        await writer.drain()
        assert (await served.complete(max_tokens=1))["choices"]


async def test_choices_that_can_never_run_are_400(make_server: MakeServer) -> None:
    async with make_server(engine={"max_num_seqs": 2, "max_queue": 3}) as served:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "n": 6}),
            ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 6}),
            ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}),
            ("/v1/chat/completions", {**CHAT, "n": 6}),
        ):
            response = await served.post(path, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == "n"
            for word in ("6 choices", "2 run", "3 wait", "--max-queue"):
                assert word in error["message"]
        assert len((await served.complete(["a"], n=5, max_tokens=1))["choices"]) == 5


# --- bodies ---------------------------------------------------------------------------------------
def test_bodies_of_a_client_and_of_all_are_bounded() -> None:
    budget = BodyBudget(1000)
    with budget.hold("a") as first:
        first.grow(_FREE_BYTES)
        assert budget.num_bytes == 0
        first.grow(8000)
        assert budget.num_bytes == 8000
        with budget.hold("a") as second, pytest.raises(OverloadedError, match="8000 of them from"):
            second.grow(_FREE_BYTES + 1)
        with budget.hold("b") as third, budget.hold("c") as fourth:
            for _ in range(8):
                third.grow(1000 if third._size else _FREE_BYTES + 1000)
            with pytest.raises(OverloadedError, match="16000 bytes of request bodies"):
                fourth.grow(_FREE_BYTES + 1)
            with budget.hold("c") as small:
                small.grow(_FREE_BYTES)
        assert budget.num_bytes == 8000
    assert budget.num_bytes == 0
    assert not budget._clients


async def test_a_body_over_the_budget_is_503(served: Served) -> None:
    served.state.bodies = BodyBudget(1)
    large = b'{"prompt": "a"}'.ljust(_FREE_BYTES + 100)
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        response = await served.client.post(path, content=large, headers=JSON)
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
    assert (await served.complete(max_tokens=1))["choices"]
    assert served.state.bodies.num_bytes == 0


async def test_what_was_held_of_a_body_is_given_back(served: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'.ljust(_FREE_BYTES + 100)
    response = await served.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200
    assert served.state.bodies.num_bytes == 0
    _, writer = await served.connect()
    head = without_body("/tokenize").replace(b"Content-Length: ", b"Content-Length: 9999")
    writer.write(head + b" " * (_FREE_BYTES + 100))
    await until(lambda: served.state.bodies.num_bytes > 0)
    writer.transport.abort()
    await until(lambda: served.state.bodies.num_bytes == 0)


# --- text -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 10_000}),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "x" * 10_000}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [65] * 10_000}),
    ],
)
async def test_text_over_the_budget_is_429(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    clients: list[str] = []

    async def refuse(client: str, size: int, function: object) -> None:
        clients.append(client)
        raise QueueFullError("too much text", retry_after_s=3)

    monkeypatch.setattr(served.llm.text, "run", refuse)
    response = await served.post(path, **body)
    assert response.status_code == 429, response.text
    assert response.headers["retry-after"] == "3"
    assert clients == ["127.0.0.1"]
    await served.becomes_idle()


async def test_a_key_names_the_client_of_a_text(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("secret",)}) as served:
        clients: list[str] = []
        run = served.llm.text.run

        async def noted(client: str, *rest: Any) -> Any:
            clients.append(client)
            return await run(client, *rest)

        served.llm.text.run = noted  # type: ignore[method-assign]
        headers = {"authorization": "Bearer secret"}
        response = await served.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 200
        (client,) = clients
        assert len(client) == 16
        assert client != "127.0.0.1"


async def test_a_client_that_leaves_stops_the_rendering_of_its_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def render(messages: object, chat: object, stopped: Stopped) -> str:
        begun.set()
        while not stopped():
            pass
        ended.set()
        raise QueueFullError("nobody waits")

    monkeypatch.setattr(served.llm, "render_chat", render)
    _, writer = await served.connect()
    writer.write(request_bytes("/v1/chat/completions", CHAT))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    writer.transport.abort()
    assert await asyncio.to_thread(ended.wait, PATIENCE_S), "nobody told the rendering to stop"
    await served.becomes_idle()
    assert served.llm.text.num_bytes == 0


async def test_a_large_body_is_decoded_on_a_thread(served: Served) -> None:
    sizes: list[int] = []
    run = served.llm.text.run

    async def noted(client: str, size: int, function: Any) -> Any:
        sizes.append(size)
        return await run(client, size, function)

    served.llm.text.run = noted  # type: ignore[method-assign]
    body = b'{"prompt": "a", "max_tokens": 1}'.ljust(100_000)
    response = await served.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200
    assert sizes == [100_000]


LONG = "word " * 20_000
TURN = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
CALL = {"function": {"name": "f", "arguments": LONG}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [TURN], "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": [TURN], "documents": [{"text": LONG}]}),
        ("/v1/chat/completions", {"messages": [TURN], "chat_template_kwargs": {"x": LONG}}),
        (
            "/v1/chat/completions",
            {"messages": [TURN, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TURN]},
        ),
        ("/tokenize", {"messages": [TURN], "tools": [TOOL]}),
    ],
    ids=["tools", "documents", "arguments", "calls", "tokenize"],
)
async def test_all_that_a_template_is_given_counts_as_text(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    """Else a long list of tools has the thread that is kept for small texts."""
    sizes: list[int] = []

    async def refuse(client: str, size: int, function: Any) -> Any:
        if "decode" in function.__qualname__ or "read_json" in function.__qualname__:
            return function(lambda: False)
        sizes.append(size)
        raise QueueFullError("enough is known")

    served.llm.text.run = refuse  # type: ignore[method-assign]
    response = await served.client.post(path, json=body)
    assert response.status_code == 429, response.text
    assert sizes[0] >= len(LONG)


async def test_many_allowed_ids_are_checked_on_a_thread(served: Served) -> None:
    sizes: list[int] = []
    run = served.llm.text.run

    async def noted(client: str, size: int, function: Any) -> Any:
        sizes.append(size)
        return await run(client, size, function)

    served.llm.text.run = noted  # type: ignore[method-assign]
    await served.complete("a", allowed_token_ids=[5] * 20_000, max_tokens=1)
    assert sizes == [80_001]


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("allowed_token_ids", [5] * 400, 400),
        ("bad_words", ["xy" * 200], 400),
        ("logit_bias", {str(token): 1 for token in range(200)}, 200),
        ("stop", ["x" * 300, "y" * 100], 400),
        ("stop_token_ids", [5] * 400, 400),
    ],
)
async def test_what_all_prompts_repeat_is_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, size: int
) -> None:
    monkeypatch.setattr(request_limits, "MAX_CALL_RULES", 5 * size)
    body = {name: value, "max_tokens": 1}
    await served.complete(["a"] * 5, **body)
    response = await served.post("/v1/completions", prompt=["a"] * 6, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name
    assert "6 prompts" in error["message"]
    assert f"at most {request_limits.MAX_CALL_RULES} in all" in error["message"]
    await served.becomes_idle()
