"""Responses in the background: cancelled, followed, and their events, which are kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllmx_server.apis.responses import store as stored
from vllmx_server.apis.responses.store import KeptResponses

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_messages import named_events
from .test_responses import ASK, create


async def test_in_the_background(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        made = await create(served, background=True, max_output_tokens=400)
        assert (made["status"], made["output"]) == ("queued", [])
        path = f"/v1/responses/{made['id']}"
        ask = {**ASK, "previous_response_id": made["id"]}
        early = await served.client.post("/v1/responses", json=ask)
        assert "has not ended yet" in early.json()["error"]["message"]
        cancelled = (await served.client.post(path + "/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["error"] is None
        assert (await served.client.get(path)).json() == cancelled
        await served.becomes_idle()
        short = await create(served, background=True)
        async with asyncio.timeout(PATIENCE_S):
            while (now := (await served.client.get(f"/v1/responses/{short['id']}")).json())[
                "status"
            ] in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
        assert now["status"] == "incomplete"
        again = await served.client.post(f"/v1/responses/{short['id']}/cancel")
        assert again.json() == now, "it has ended already"
        plain = await create(served)
        refused = await served.client.post(f"/v1/responses/{plain['id']}/cancel")
        assert refused.status_code == 400


async def test_events_of_the_background_are_followed(make_server: MakeServer) -> None:
    async with make_server(step_s=0.005) as served:
        made = await create(served, background=True, max_output_tokens=400)
        path = f"/v1/responses/{made['id']}?stream=true"
        one, two = await asyncio.gather(
            served.client.get(path), served.client.get(path + "&starting_after=3")
        )
        events = named_events(one.text)
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        assert events[-1][0] == "response.incomplete"
        assert one.text.endswith(two.text)
        assert '"sequence_number":4,' in two.text.partition("\n\n")[0]
        late = await served.client.get(path)
        assert late.status_code == 400, "it was not made to be streamed"


async def test_events_of_the_background_are_kept(make_server: MakeServer, tmp_path: Any) -> None:
    """A client that lost its connection goes on behind the last event that it has, also when the
    response has ended or the server is another."""
    folder = {"data_dir": str(tmp_path / "data")}
    asked = {**ASK, "background": True, "stream": True, "max_output_tokens": 40}
    async with make_server(folder) as served:
        text = (await served.client.post("/v1/responses", json=asked)).text
        number, made = len(named_events(text)), named_events(text)[0][1]["response"]["id"]
        await served.becomes_idle()
    async with make_server(folder) as served:
        path = f"/v1/responses/{made}?stream=true"
        again = await served.client.get(path)
        assert again.headers["content-type"].startswith("text/event-stream")
        assert again.text == text
        for after in (0, 7, number - 2):
            rest = await served.client.get(f"{path}&starting_after={after}")
            assert (
                rest.text == text[text.index(f'"sequence_number":{after},') :].partition("\n\n")[2]
            )
        assert (await served.client.get(f"{path}&starting_after={number - 1}")).text == ""
        assert (await served.client.get(f"{path}&starting_after={number + 9}")).text == ""
        await served.client.delete(f"/v1/responses/{made}")
        assert (await served.client.get(path)).status_code == 404
        assert await served.state.store(KeptResponses).responses.events(made, -1) is None, (
            "gone with it"
        )


async def test_events_count_as_what_is_kept(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_EVENTS_BYTES", 20_000)
    asked = {**ASK, "background": True, "stream": True}

    async def made(served: Served, tokens: int) -> str:
        body = {**asked, "max_output_tokens": tokens}
        text = (await served.client.post("/v1/responses", json=body)).text
        await served.becomes_idle()
        return str(named_events(text)[0][1]["response"]["id"])

    async with make_server({"max_stored_bytes": 20_000}) as served:
        ids = [await made(served, 6) for _ in range(12)]
        kept = [
            await served.state.store(KeptResponses).responses.events(each, -1) is not None
            for each in ids
        ]
        assert 0 < sum(kept) < 12
        assert kept == sorted(kept), "the oldest made room"
        monkeypatch.setattr(stored, "MAX_EVENTS_BYTES", 1000)  # less than a response by itself
        long = await served.client.get(f"/v1/responses/{await made(served, 30)}?stream=true")
        assert long.status_code == 400
        assert "were not kept" in long.json()["error"]["message"]


@pytest.mark.usefixtures("paced_steps")
async def test_events_do_not_push_out_their_response(make_server: MakeServer) -> None:
    """Paced: few events, each with many tokens, would fit."""
    asked = {**ASK, "background": True, "stream": True, "max_output_tokens": 200}
    async with make_server({"max_stored_bytes": 3000}, step_s=3600.0) as served:
        text = (await served.client.post("/v1/responses", json=asked)).text
        path = f"/v1/responses/{named_events(text)[0][1]['response']['id']}"
        await served.becomes_idle()
        assert (await served.client.get(path)).json() == named_events(text)[-1][1]["response"]
        assert (await served.client.get(path + "?stream=true")).status_code == 400
