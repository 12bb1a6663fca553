"""OpenAI's conversations: kept, paged, owned, bounded, and what responses make of them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import openai
import pytest
from vllmx_server.apis.responses import conversation_store as stored
from vllmx_server.apis.responses.response import BackgroundResponses
from vllmx_server.apis.responses.store import KeptResponses

from tests.waiting import until

from .conftest import MakeServer, Served
from .test_responses import ASK, CALL, RESULT, create

HELLO = {"type": "message", "role": "user", "content": "hi"}


def client_of(served: Served, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0)


async def begin(served: Served, *items: dict[str, Any], **fields: Any) -> str:
    response = await served.client.post("/v1/conversations", json={"items": items, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def listed(served: Served, name: str, query: str = "order=asc") -> list[dict[str, Any]]:
    response = await served.client.get(f"/v1/conversations/{name}/items?{query}")
    assert response.status_code == 200, response.text
    return response.json()["data"]  # type: ignore[no-any-return]


async def test_the_openai_client_keeps_a_conversation(served: Served) -> None:
    async with client_of(served) as client:
        made = await client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "hi"}], metadata={"a": "b"}
        )
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert made.id.startswith("conv_")
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"c": "d"})
        assert (changed.id, changed.metadata) == (made.id, {"c": "d"})
        added = await client.conversations.items.create(
            made.id, items=[CALL, RESULT, {"role": "assistant", "content": "warm"}]
        )
        assert [item.type for item in added.data] == [
            "function_call", "function_call_output", "message"
        ]  # fmt: skip
        items = [item async for item in client.conversations.items.list(made.id, limit=2)]
        assert [item.type for item in items] == [
            "message", "function_call_output", "function_call", "message"
        ]  # fmt: skip
        assert items[0].content[0].to_dict() == {  # type: ignore[union-attr, index]
            "type": "output_text", "text": "warm", "annotations": []
        }  # fmt: skip
        assert all(item.status == "completed" for item in items)  # type: ignore[union-attr]
        first = items[-1]
        assert await client.conversations.items.retrieve(first.id, conversation_id=made.id) == first
        left = await client.conversations.items.delete(first.id, conversation_id=made.id)
        assert left.id == made.id
        with pytest.raises(openai.NotFoundError, match="has no item"):
            await client.conversations.items.retrieve(first.id, conversation_id=made.id)
        gone = await client.conversations.delete(made.id)
        assert (gone.deleted, gone.object) == (True, "conversation.deleted")
        with pytest.raises(openai.NotFoundError, match="has no conversation"):
            await client.conversations.items.list(made.id)


async def test_a_response_goes_on_with_a_conversation(served: Served) -> None:
    """The model sees the same as if the client had sent all of it; both turns are added."""
    name = await begin(served, {"role": "user", "content": "I am Ann."})
    first = await create(served, conversation=name)
    assert first["conversation"] == {"id": name}
    second = await create(served, conversation={"id": name, "more": 1}, input="and?")
    past = [{"role": "user", "content": "I am Ann."}, {"role": "user", "content": "hi"}]
    by_hand = await create(
        served, input=[*past, *first["output"], {"role": "user", "content": "and?"}]
    )
    assert by_hand["conversation"] is None
    assert second["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    items = await listed(served, name)
    assert [item["role"] for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert items[2]["id"] == first["output"][0]["id"]
    assert items[4]["content"] == second["output"][0]["content"]


async def test_streams_and_unstored_ones_and_the_background_are_added(served: Served) -> None:
    name = await begin(served)
    await served.client.post("/v1/responses", json={**ASK, "conversation": name, "stream": True})
    await create(served, conversation=name, store=False)
    made = await create(served, conversation=name, background=True)
    await until(lambda: served.state.store(BackgroundResponses).get(made["id"]) is None)
    items = await listed(served, name)
    assert [item["role"] for item in items] == ["user", "assistant"] * 3


async def test_ids_are_unique_in_a_conversation(served: Served) -> None:
    name = await begin(served, {**HELLO, "id": "m1"}, {**HELLO, "id": "m1"})
    await create(served, conversation=name, input=[{**HELLO, "id": "m1"}])
    ids = [item["id"] for item in await listed(served, name)]
    assert ids[0] == "m1"
    assert len(set(ids)) == len(ids) == 4


async def test_a_conversation_alone_says_what_is_asked(served: Served) -> None:
    name = await begin(served, HELLO)
    body = {"model": "fake", "max_output_tokens": 2, "conversation": name}
    assert (await served.client.post("/v1/responses", json=body)).status_code == 200
    assert [item["role"] for item in await listed(served, name)] == ["user", "assistant"]
    for past in ({}, {"conversation": await begin(served)}):
        alone = {"model": "fake", "max_output_tokens": 2, **past}
        refused = await served.client.post("/v1/responses", json=alone)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "input"


@pytest.mark.parametrize("odd", ["a/b", "..", ".", "/", "c%d 😀", "a..b"])
async def test_every_id_of_an_item_names_it_in_paths(served: Served, odd: str) -> None:
    name = await begin(served, {**HELLO, "id": odd})
    (item,) = await listed(served, name)
    assert (item["id"] == odd) == (odd in ("c%d 😀", "a..b"))
    path = f"/v1/conversations/{name}/items/{quote(item['id'], safe='')}"
    assert (await served.client.get(path)).json() == item
    assert (await served.client.delete(path)).status_code == 200


async def test_items_in_pages(served: Served) -> None:
    name = await begin(served, *({**HELLO, "id": f"m{i}"} for i in range(5)))

    async def page(query: str) -> tuple[list[str], bool]:
        found = (await served.client.get(f"/v1/conversations/{name}/items?{query}")).json()
        return [each["id"] for each in found["data"]], found["has_more"]

    assert await page("") == (["m4", "m3", "m2", "m1", "m0"], False)
    assert await page("order=asc&limit=2") == (["m0", "m1"], True)
    assert await page("order=asc&after=m1&limit=3") == (["m2", "m3", "m4"], False)
    assert await page("after=m3&limit=2") == (["m2", "m1"], True)
    assert await page("after=none") == ([], False)
    for query in ("limit=101", "limit=0", "order=up", "nonsense=1"):
        response = await served.client.get(f"/v1/conversations/{name}/items?{query}")
        assert response.status_code == 400, query


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [HELLO] * 21}, "items"),
        ({"items": [{"type": "web_search_call"}]}, "items[0]"),
        ({"items": [HELLO, {"type": "message", "content": "hi"}]}, "items[1].role"),
        ({"items": [{**CALL, "name": None}]}, "items[0].name"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"items": [{**HELLO, "id": "x" * 129}]}, "items[0].id"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_cannot_be_kept_is_named(
    served: Served, body: dict[str, Any], param: str
) -> None:
    response = await served.client.post("/v1/conversations", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_bodies_of_changes_are_checked(served: Served) -> None:
    path = f"/v1/conversations/{await begin(served)}"
    for where, body in (
        (path, {}),
        (path, {"metadata": {"a": "b"}, "name": "x"}),
        (path + "/items", {}),
        (path + "/items", {"items": []}),
        (path + "/items", {"items": [{"type": "nonsense"}]}),
    ):
        assert (await served.client.post(where, json=body)).status_code == 400, body
    cleared = await served.client.post(path, json={"metadata": None})
    assert cleared.json()["metadata"] == {}


async def test_one_past_at_a_time(served: Served) -> None:
    name = await begin(served)
    first = await create(served)
    both = {**ASK, "conversation": name, "previous_response_id": first["id"]}
    response = await served.client.post("/v1/responses", json=both)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "conversation"
    turn = await create(served, conversation=name)
    alone = {**ASK, "previous_response_id": turn["id"]}
    response = await served.client.post("/v1/responses", json=alone)
    assert response.status_code == 400, "what came before that turn would be lost"
    assert "go on with the conversation" in response.json()["error"]["message"]
    response = await served.client.post("/v1/responses", json={**ASK, "conversation": "conv_no"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "conversation_not_found"
    assert response.json()["error"]["param"] == "conversation"


async def test_other_keys_see_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        items = {"items": [{**HELLO, "id": "m1"}]}
        made = await served.client.post("/v1/conversations", json=items, headers=one)
        path = f"/v1/conversations/{made.json()['id']}"
        for method, where, body in (
            ("GET", path, None),
            ("POST", path, {"metadata": {}}),
            ("GET", path + "/items", None),
            ("POST", path + "/items", items),
            ("GET", path + "/items/m1", None),
            ("DELETE", path + "/items/m1", None),
            ("DELETE", path, None),
            ("POST", "/v1/responses", {**ASK, "conversation": made.json()["id"]}),
        ):
            response = await served.client.request(method, where, json=body, headers=two)
            assert response.status_code == 404, (method, where)
        kept = await served.client.get(path + "/items", headers=one)
        assert [item["id"] for item in kept.json()["data"]] == ["m1"]


async def test_the_least_recently_used_make_room(make_server: MakeServer) -> None:
    """Empty ones count, too."""
    async with make_server({"max_stored_bytes": 10_000}) as served:
        names = [await begin(served) for _ in range(12)]
        kept = [
            name
            for name in names
            if (await served.client.get(f"/v1/conversations/{name}")).status_code == 200
        ]
        assert 0 < len(kept) < 12
        assert kept == names[-len(kept) :]
        items = {"items": [{**HELLO, "content": "x" * 11_000}]}
        response = await served.client.post(f"/v1/conversations/{names[-1]}/items", json=items)
        assert response.status_code == 400
        assert "--max-stored-bytes" in response.json()["error"]["message"]
        assert await listed(served, names[-1]) == []


async def test_conversations_are_bounded(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_ITEMS", 3)
    async with make_server({"max_body_bytes": 2_000}) as served:
        name = await begin(served, HELLO, HELLO)
        path = f"/v1/conversations/{name}/items"
        response = await served.client.post(path, json={"items": [HELLO, HELLO]})
        assert response.status_code == 400
        assert "limit of 3" in response.json()["error"]["message"]
        long = {**HELLO, "content": "x" * 1500}
        name = await begin(served, long)
        path = f"/v1/conversations/{name}/items"
        assert (await served.client.post(path, json={"items": [long]})).status_code == 200
        response = await served.client.post("/v1/responses", json={**ASK, "conversation": name})
        assert response.status_code == 400
        assert "2000 bytes" in response.json()["error"]["message"]
        await served.client.post(path, json={"items": [HELLO]})
        found = (await served.client.get(path + "?order=asc")).json()
        assert len(found["data"]) == 2, "a page ends with the item that brings it to the limit"
        assert found["has_more"]
        rest = (await served.client.get(f"{path}?order=asc&after={found['last_id']}")).json()
        assert (len(rest["data"]), rest["has_more"]) == (1, False)


async def test_they_outlive_the_server_and_expire(
    make_server: MakeServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"data_dir": str(tmp_path / "data")}
    async with make_server(folder) as served:
        name = await begin(served, HELLO)
    async with make_server(folder) as served:
        assert len(await listed(served, name)) == 1
        later = stored.now() + 31 * 86400
        monkeypatch.setattr(stored, "now", lambda: later)
        assert (await served.client.get(f"/v1/conversations/{name}")).status_code == 404
        await served.state.store(KeptResponses).conversations.clean()
        count = "SELECT count(*) FROM items"
        rows = await served.state.storage.database.run(lambda c: c.execute(count).fetchone())
        assert rows == (0,)
