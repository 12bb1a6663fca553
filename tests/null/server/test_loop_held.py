"""No request holds the event loop, however much it asks for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllmx_engine.client import request_limits
from vllmx_engine.client.request_state import MAX_DELTA_ROWS
from vllmx_server.schema.record import _PIECE_BYTES, Items, Members, json_pieces

from .conftest import JSON, MakeServer, Served, events_of, request_bytes
from .loop_meter import loop_meter, shortest_hold

LIMIT_MS = 20
BIG = {"max_model_len": 2000, "verify_pages": False}


def answer_of(served: Served, request: bytes, begun: Callable[[], object] | None = None) -> bytes:
    """What comes back, read beside the event loop. `begun` is called when the first byte is there,
    and nothing more is taken until it returns."""
    port = int(served.url.rpartition(":")[2])
    with socket.socket() as client:
        if begun is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(request)
        if begun is not None:
            client.recv(1, socket.MSG_PEEK)
            begun()
        answer = bytearray()
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 16)
            assert data, "the connection ended before the answer"
            answer += data
    return bytes(answer)


async def test_the_meter_sees_work_and_no_waiting() -> None:
    with loop_meter() as meter:
        await asyncio.sleep(0.05)
        assert meter.longest_ms < 10
        await asyncio.sleep(0)
        sum(range(3_000_000))
        await asyncio.sleep(0)
    assert meter.longest_ms > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "n": 8, "logprobs": 20, "max_tokens": 150}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "n": 8,
                "logprobs": True,
                "top_logprobs": 20,
                "max_tokens": 150,
            },
        ),
        ("/v1/completions", {"prompt": "x" * 1500, "prompt_logprobs": 20, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x" * 1500, "logprobs": 20, "echo": True, "max_tokens": 1}),
    ],
    ids=["completions", "chat", "prompt", "echo"],
)
async def test_a_large_answer_goes_out_in_pieces(
    make_server: MakeServer, path: str, body: dict[str, Any]
) -> None:
    """Answers that hold many numbers are made and encoded a piece at a time."""
    async with make_server(**BIG) as served:
        request = request_bytes(path, body)
        meter, answer = await shortest_hold(
            lambda: asyncio.to_thread(answer_of, served, request), LIMIT_MS
        )
        assert b"transfer-encoding: chunked" in answer[:1000].lower()
        assert meter.longest_ms < LIMIT_MS, meter.what
        response = await served.post(path, **body)
        (first, *_) = response.json()["choices"]
        assert first["finish_reason"] == "length"


async def test_a_small_answer_has_a_length(make_server: MakeServer) -> None:
    async with make_server() as served:
        response = await served.post("/v1/completions", prompt="ab", logprobs=2, max_tokens=2)
        assert int(response.headers["content-length"]) == len(response.content)


async def test_a_slow_stream_gets_what_gathered_in_parts(make_server: MakeServer) -> None:
    """The engine ends long before the client reads on: what it has not read is merged."""
    body = {"prompt": "ab", "n": 3, "logprobs": 5, "max_tokens": 1200, "stream": True, "seed": 1}
    async with make_server(send_bytes=8192, **BIG) as served:
        request = request_bytes("/v1/completions", body)

        async def read_slowly() -> bytes:
            begun, go_on = threading.Event(), threading.Event()

            def stand() -> None:
                begun.set()
                go_on.wait()

            reading = asyncio.ensure_future(asyncio.to_thread(answer_of, served, request, stand))
            await asyncio.to_thread(begun.wait)
            while served.llm.num_in_flight:
                await asyncio.sleep(0.005)
            go_on.set()
            return await reading

        meter, answer = await shortest_hold(read_slowly, LIMIT_MS)
        assert meter.longest_ms < LIMIT_MS, meter.what
        events = events_of(answer.decode())
        assert events[-1] == "[DONE]"
        whole = await served.complete(**{**body, "stream": False})
        for index, choice in enumerate(whole["choices"]):
            parts = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
            assert max(len(part["logprobs"]["tokens"]) for part in parts) == MAX_DELTA_ROWS
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == "length"
            for name, values in choice["logprobs"].items():
                joined = [value for part in parts for value in part["logprobs"][name]]
                assert joined == values, name


async def test_log_probabilities_of_a_call_are_bounded(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "MAX_CALL_LOGPROBS", 1000)
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 9}
    async with make_server() as served:
        for param, number, body in (
            ("logprobs", 1010, {"prompt": "a", "n": 10, "logprobs": 0, "max_tokens": 101}),
            ("logprobs", 1008, {"prompt": ["a", "b"], "n": 4, "logprobs": 20, "max_tokens": 6}),
            ("prompt_logprobs", 1010, {"prompt": "x" * 101, "prompt_logprobs": 9}),
            ("prompt_logprobs", 1002, {"prompt": ["x" * 334] * 3, "prompt_logprobs": 0}),
            ("logprobs", 1010, {**chat, "n": 1, "max_tokens": 101}),
        ):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            response = await served.post(path, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            assert f"{number} " in error["message"]
            assert "at most 1000 in all" in error["message"]
            await served.becomes_idle()
        answer = (await served.post("/v1/chat/completions", **chat)).json()
        assert answer["usage"]["completion_tokens"] == 100, "as many as the limit holds"
        assert await served.complete("a", logprobs=4, max_tokens=200)


async def test_a_call_over_the_limit_hands_nothing_to_the_core(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "MAX_CALL_LOGPROBS", 1000)
    async with make_server() as served:
        handed = []
        monkeypatch.setattr(served.llm._frontend, "add", handed.append)
        response = await served.post(
            "/v1/completions", prompt=["x" * 20] * 60, prompt_logprobs=0, max_tokens=1
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"
        assert not handed
        assert not served.llm.num_in_flight


async def test_a_vocabulary_of_allowed_ids_is_checked_off_the_loop(
    make_server: MakeServer,
) -> None:
    async with make_server() as served:
        ids = list(range(259)) * 2000  # as many as any vocabulary has, and all of this one's
        body = {"prompt": "ab", "max_tokens": 1, "allowed_token_ids": ids}
        request = request_bytes("/v1/completions", body | {"stream": True})
        meter, answer = await shortest_hold(
            lambda: asyncio.to_thread(answer_of, served, request), LIMIT_MS
        )
        assert meter.longest_ms < LIMIT_MS, meter.what
        assert events_of(answer.decode())[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": ["a"] * 150_000}]}),
        ("/detokenize", {"tokens": [5] * 500_000}),
    ],
    ids=["tokenize", "detokenize"],
)
async def test_many_small_values_are_walked_off_the_loop(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    async def ask() -> int:
        return (await served.client.post(path, content=content, headers=JSON)).status_code

    content = json.dumps(body).encode()
    meter, status = await shortest_hold(ask, LIMIT_MS)
    assert meter.longest_ms < LIMIT_MS, meter.what
    assert status in (200, 400)  # the template may be out of its budget


def test_json_in_pieces_is_the_same_json() -> None:
    rows = [{"a": [1, "é"], "b": None}] * 5000
    values: list[tuple[Any, Any]] = [
        (Items([]), []),
        (Items(iter(rows)), rows),
        ({"x": 1, "y": Items(rows), "z": {"w": Items([1])}}, {"x": 1, "y": rows, "z": {"w": [1]}}),
        (Items([{"r": Items(rows)}, 5, {}]), [{"r": rows}, 5, {}]),
        ({}, {}),
        ("text", "text"),
        (Members([None] * 5000), {}),
        (Items([Members([None, ("a", 1), *[None] * 5000, ("b", 2)]), 5]), [{"a": 1, "b": 2}, 5]),
    ]
    for lazy, plain in values:
        pieces = list(json_pieces(lazy))
        assert json.loads(b"".join(pieces)) == plain
        assert all(0 < len(piece) < 2 * _PIECE_BYTES for piece in pieces)
    whole = list(json_pieces(Items(rows)))
    assert all(len(piece) >= _PIECE_BYTES for piece in whole[:-1])
    assert len(list(json_pieces(Members([None] * 5000)))) > 5000 * 64 // _PIECE_BYTES - 1
