"""Anthropic's batches of Messages, read by its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch
from vllmx_server.apis.batches import message_routes as batch_messages
from vllmx_server.apis.batches import routes as batch_routes
from vllmx_server.apis.batches.schema import CREATE_MESSAGES
from vllmx_server.errors import BodyTooLargeError

from tests.waiting import PATIENCE_S

from .conftest import JSON, MakeServer, Served
from .test_batches import begin as begin_lines
from .test_batches import ended as ended_lines
from .test_batches import line

PATH = "/v1/messages/batches"


def asked(custom_id: str = "a", **params: Any) -> dict[str, Any]:
    hello = [{"role": "user", "content": "hi"}]
    fields = {"model": "fake", "max_tokens": 4, "messages": hello, "ignore_eos": True}
    return {"custom_id": custom_id, "params": {**fields, **params}}


@asynccontextmanager
async def client_of(served: Served, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as client:
        yield client


async def ended(client: anthropic.AsyncAnthropic, batch: MessageBatch) -> MessageBatch:
    async with asyncio.timeout(PATIENCE_S):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.01)
            batch = await client.messages.batches.retrieve(batch.id)
    return batch


async def results(client: anthropic.AsyncAnthropic, batch: MessageBatch) -> dict[str, Any]:
    found = await client.messages.batches.results(batch.id)
    return {each.custom_id: each.result async for each in found}


async def test_the_anthropic_client_runs_a_batch(served: Served) -> None:
    async with client_of(served) as client:
        requests: list[Any] = [asked(f"r{i}", max_tokens=2 + i, temperature=0) for i in range(5)]
        requests += [asked("hot", temperature=-1), asked("streamed", stream=True)]
        requests += [asked("other", model="other")]
        begun = await client.messages.batches.create(requests=requests)
        assert begun.id.startswith("msgbatch_")
        assert begun.processing_status == "in_progress"
        assert begun.request_counts.processing == 8
        assert begun.expires_at - begun.created_at == timedelta(days=1)
        assert begun.results_url is begun.ended_at is None
        batch = await ended(client, begun)
        assert batch.request_counts.to_dict() == {
            "processing": 0, "succeeded": 5, "errored": 3, "canceled": 0, "expired": 0
        }  # fmt: skip
        assert batch.ended_at is not None
        assert batch.ended_at >= batch.created_at
        found = await results(client, batch)
        assert len(found) == 8
        for index in range(5):
            message = found[f"r{index}"].message
            assert message.type == "message"
            assert message.usage.output_tokens == 2 + index
            direct: Any = {**requests[index]["params"]}
            extra = {name: direct.pop(name) for name in ("ignore_eos", "temperature")}
            direct["extra_body"] = extra
            again = await client.messages.create(**direct)
            assert message.content == again.content
        assert found["hot"].error.error.type == "invalid_request_error"
        assert "temperature" in found["hot"].error.error.message
        assert found["streamed"].error.error.type == "invalid_request_error"
        assert found["other"].error.error.type == "not_found_error"
        gone = await client.messages.batches.delete(batch.id)
        assert (gone.id, gone.type) == (batch.id, "message_batch_deleted")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(batch.id)
        count = "SELECT (SELECT count(*) FROM files) + (SELECT count(*) FROM lines)"
        left = await served.state.storage.database.run(lambda c: c.execute(count).fetchone())
        assert left == (0,), "the requests and results are gone, too"
        assert not list(served.state.storage.folder.files().iterdir())


async def test_a_cancelled_batch_says_what_became_of_each(make_server: MakeServer) -> None:
    async with (
        make_server(engine={"max_num_seqs": 2}, step_s=0.005) as served,
        client_of(served) as client,
    ):
        requests: list[Any] = [asked(str(i), max_tokens=400) for i in range(20)]
        begun = await client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            await client.messages.batches.delete(begun.id)
        early = await served.client.get(f"{PATH}/{begun.id}/results")
        assert early.status_code == 400
        assert early.json()["type"] == "error"
        cancelled = await client.messages.batches.cancel(begun.id)
        assert cancelled.processing_status in ("canceling", "ended")
        assert cancelled.cancel_initiated_at is not None
        batch = await ended(client, cancelled)
        counts = batch.request_counts
        assert counts.succeeded + counts.canceled == 20
        assert counts.canceled > 0
        found = await results(client, batch)
        types = [each.type for each in found.values()]
        assert types.count("canceled") == counts.canceled
        assert types.count("succeeded") == counts.succeeded
        with pytest.raises(anthropic.BadRequestError, match="only one that is being worked on"):
            await client.messages.batches.cancel(begun.id)
        await served.becomes_idle()


async def test_a_batch_expires(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_server.apis.batches.message_routes._WINDOW_S", 1)
    async with (
        make_server(engine={"max_num_seqs": 2}, step_s=0.02) as served,
        client_of(served) as client,
    ):
        requests: list[Any] = [asked(str(i), max_tokens=400) for i in range(5)]
        batch = await ended(client, await client.messages.batches.create(requests=requests))
        assert batch.request_counts.expired == 5
        assert {each.type for each in (await results(client, batch)).values()} == {"expired"}
        await served.becomes_idle()


async def test_batches_in_pages(served: Served) -> None:
    """The two APIs do not see each other's batches and files."""
    theirs = await ended_lines(served, await begin_lines(served, [line(max_tokens=1)]))
    async with client_of(served) as client:
        made = [
            (await client.messages.batches.create(requests=[asked()])).id  # type: ignore[list-item]
            for _ in range(5)
        ][::-1]
        listed = [batch.id async for batch in client.messages.batches.list(limit=2)]
        assert listed == made
        before = await client.messages.batches.list(before_id=made[4], limit=2)
        assert [batch.id for batch in before.data] == made[2:4]
        assert before.has_more
        newest = await client.messages.batches.list(before_id=made[2])
        assert [batch.id for batch in newest.data] == made[:2]
        assert not newest.has_more
        for query in ("limit=0", "limit=1001", "nonsense=1", f"after_id={made[0]}&before_id=x"):
            assert (await served.client.get(f"{PATH}?{query}")).status_code == 400
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(theirs["id"])
        for each in made:
            await ended(client, await client.messages.batches.retrieve(each))
    assert (await served.client.get(f"/v1/batches/{made[0]}")).status_code == 404
    openai_ones = (await served.client.get("/v1/batches")).json()["data"]
    assert [each["id"] for each in openai_ones] == [theirs["id"]]
    files = (await served.client.get("/v1/files")).json()["data"]
    assert {each["purpose"] for each in files} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [asked(), asked()]}, "requests[1].custom_id"),
        ({"requests": [asked("a b")]}, "custom_id"),
        ({"requests": [asked("x" * 65)]}, "custom_id"),
        ({"requests": [asked("")]}, "custom_id"),
        ({"requests": [{"custom_id": "a", "params": 1}]}, "requests[0].params"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        ({"requests": [asked()], "nonsense": 1}, "nonsense"),
    ],
)
async def test_wrong_batches_are_refused(served: Served, body: dict[str, Any], param: str) -> None:
    response = await served.client.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert param in error["error"]["message"]
    assert (await served.client.get("/v1/files")).json()["data"] == []


async def test_the_number_and_the_bytes_are_bounded(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server({"max_body_bytes": 4000, "max_stored_bytes": 1000}) as served:
        requests = {"requests": [asked(f"r{i}") for i in range(30)]}
        assert (await served.client.post(PATH, json=requests)).status_code == 413
        requests = {"requests": [asked(f"r{i}") for i in range(8)]}
        full = await served.client.post(PATH, json=requests)
        assert full.status_code == 413
        assert "--max-stored-bytes" in full.json()["error"]["message"]
        monkeypatch.setattr(batch_routes, "MAX_OPEN", 0)
        busy = await served.client.post(PATH, json={"requests": [asked()]})
        assert busy.status_code == 429
        assert busy.json()["error"]["type"] == "rate_limit_error"


async def test_other_keys_see_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        async with client_of(served, "one") as client:
            requests: list[Any] = [asked(max_tokens=1)]
            mine = await ended(client, await client.messages.batches.create(requests=requests))
        path = f"{PATH}/{mine.id}"
        two = {"x-api-key": "two"}
        for method, where in (
            ("GET", path),
            ("GET", path + "/results"),
            ("POST", path + "/cancel"),
            ("DELETE", path),
        ):
            response = await served.client.request(method, where, headers=two)
            assert response.status_code == 404, (method, where)
            assert response.json()["error"]["type"] == "not_found_error"
        assert (await served.client.get(PATH, headers=two)).json()["data"] == []
        assert (await served.client.get(path, headers={"x-api-key": "one"})).status_code == 200


def test_lines_are_one_line_each() -> None:
    """Whatever blanks the client writes between values."""
    body = b'{"requests": [{"custom_id": "a", "params": {\r\n "x": "y\\n",\n "z": 1}}]}'
    requests = CREATE_MESSAGES.decode(body).requests
    lines = batch_messages.input_lines(requests, 100)
    assert lines.count(b"\n") == 1
    assert json.loads(lines)["body"] == {"x": "y\n", "z": 1}
    assert batch_messages.input_lines(requests, len(lines)) == lines
    with pytest.raises(BodyTooLargeError, match="request a has over"):
        batch_messages.input_lines(requests, len(lines) - 1)


async def test_a_server_that_ends_goes_on_with_it(make_server: MakeServer, tmp_path: Any) -> None:
    folder = {"data_dir": str(tmp_path / "data")}
    requests = {"requests": [asked(str(i), max_tokens=30) for i in range(20)]}
    async with make_server(folder, {"max_num_seqs": 2}, step_s=0.002) as served:
        sent = json.dumps(requests).encode()
        begun = await served.client.post(PATH, content=sent, headers=JSON)
        name = begun.json()["id"]
    async with make_server(folder) as served, client_of(served) as client:
        batch = await ended(client, await client.messages.batches.retrieve(name))
        assert batch.request_counts.succeeded == 20
        assert len(await results(client, batch)) == 20
