"""Streams of responses whose clients leave, cancel, delete, ask too early or do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served, request_bytes
from .test_messages import named_events
from .test_responses import ASK

LONG = {**ASK, "max_output_tokens": 400, "stream": True}


async def id_of(lines: Any) -> str:
    """The id of the response, from the first event of its stream; the answer has begun then."""
    name = ""
    async for line in lines:
        if line.startswith("data: "):
            event = json.loads(line[6:])
            name = name or event["response"]["id"]
            if event["type"] == "response.output_text.delta":
                return str(name)
    raise AssertionError("the stream ended early")


async def leave(served: Served, **body: Any) -> str:
    """Begins a stream and goes away in its middle; its id."""
    async with served.client.stream("POST", "/v1/responses", json=LONG | body) as response:
        assert response.status_code == 200
        return await id_of(response.aiter_lines())


async def test_whoever_leaves_ends_a_response(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        name = await leave(served)
        await served.becomes_idle()
        path = f"/v1/responses/{name}"
        assert (await served.client.get(path)).status_code == 404, "it was never kept"
        ask = {**ASK, "previous_response_id": name}
        refused = await served.client.post("/v1/responses", json=ask)
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "previous_response_id"


async def test_one_in_the_background_goes_on_without_its_client(served: Served) -> None:
    name = await leave(served, background=True, max_output_tokens=40)
    async with asyncio.timeout(PATIENCE_S):
        kept = {"status": "queued"}
        while kept["status"] in ("queued", "in_progress"):
            kept = (await served.client.get(f"/v1/responses/{name}")).json()
    assert kept["status"] == "incomplete"
    ask = {**ASK, "previous_response_id": name}
    assert (await served.client.post("/v1/responses", json=ask)).status_code == 200


async def ended_by(served: Served, method: str, end: str) -> tuple[str, list[Any]]:
    """The events of a stream in the background that is ended after its first text, and its path."""
    lines: list[str] = []
    async with served.client.stream(
        "POST", "/v1/responses", json=LONG | {"background": True}
    ) as response:
        name = ""
        async for line in response.aiter_lines():
            lines.append(line)
            if not name and "output_text.delta" in line:
                name = json.loads(lines[1][6:])["response"]["id"]
                done = await served.client.request(method, f"/v1/responses/{name}{end}")
                assert done.status_code == 200
    return f"/v1/responses/{name}", named_events("\n".join(lines) + "\n")


async def test_what_is_answered_is_queued_no_longer(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        path = f"/v1/responses/{await leave(served, background=True)}"
        assert (await served.client.get(path)).json()["status"] == "in_progress"
        assert (await served.client.delete(path)).status_code == 200


async def test_a_stream_that_is_cancelled_says_so(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        path, events = await ended_by(served, "POST", "/cancel")
        kept = (await served.client.get(path)).json()
        assert kept["status"] == "cancelled"
        assert events[-1][0] == "response.cancelled"
        assert events[-1][1]["response"] == kept
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        await served.becomes_idle()


async def test_a_stream_that_is_deleted_ends(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        path, events = await ended_by(served, "DELETE", "")
        assert events[-1][0] == "response.cancelled"
        assert (await served.client.get(path)).status_code == 404
        assert (await served.client.delete(path)).status_code == 404
        await served.becomes_idle()


async def test_ended_at_once_by_many(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        name = await leave(served, background=True)
        path = f"/v1/responses/{name}"

        def send(method: str, end: str = "") -> Any:
            return served.client.request(method, path + end)

        answers: list[httpx.Response] = await asyncio.gather(
            send("POST", "/cancel"),
            send("DELETE"),
            send("GET"),
            send("DELETE"),
            send("POST", "/cancel"),
            send("GET", "?stream=true"),
        )
        assert {answer.status_code for answer in answers} <= {200, 400, 404}
        assert [answers[1].status_code, answers[3].status_code].count(200) == 1
        assert (await served.client.get(path)).status_code == 404
        await served.becomes_idle()


async def test_who_does_not_read_holds_up_nobody(make_server: MakeServer) -> None:
    """The answer goes on and is kept while its stream stands still."""
    async with make_server(send_bytes=4096) as served:
        _, writer = await served.connect(receive_bytes=2048)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes("/v1/responses", LONG | {"background": True}))
        await served.in_flight_become(1)
        other = await served.client.post("/v1/responses", json=ASK)
        assert other.status_code == 200
        await served.becomes_idle()
