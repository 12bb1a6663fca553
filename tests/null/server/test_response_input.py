"""What a response would go on with: counted, and made short."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from vllmx_server.apis.responses.items import item_of, summary_of
from vllmx_server.apis.responses.schema import REQUEST, InputItem

from .conftest import MakeServer, Served
from .test_conversations import begin, client_of
from .test_responses import ASK, CALL, RESULT, chat, create

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    CALL,
    RESULT,
    {"role": "user", "content": "and?"},
]


async def count(served: Served, **body: Any) -> int:
    response = await served.client.post("/v1/responses/input_tokens", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["object"] == "response.input_tokens"
    return int(found["input_tokens"])


async def test_as_many_tokens_as_the_response_reads(served: Served) -> None:
    conversation = await begin(served, *TURNS[:2])
    first = await create(served)
    for body in (
        {"input": "hi"},
        {"input": TURNS, "instructions": "Be brief.", "tools": [TOOL]},
        {"input": "and?", "previous_response_id": first["id"]},
        {"input": "and?", "conversation": conversation},
    ):
        counted = await count(served, **body)
        made = await create(served, **body)
        assert counted == made["usage"]["input_tokens"] > 0, body


async def test_the_openai_client_counts_and_compacts(served: Served) -> None:
    async with client_of(served) as client:
        counted = await client.responses.input_tokens.count(model="fake", input="hi")
        assert counted.input_tokens == await count(served, input="hi")
        short = await client.responses.compact(
            model="fake", input=[{"role": "user", "content": "hi"}]
        )
        assert short.object == "response.compaction"
        user, compaction = short.output
        assert user.to_dict(warnings=False)["content"] == [{"type": "input_text", "text": "hi"}]
        assert compaction.type == "compaction"
        assert short.usage.output_tokens > 0
        again = [item.to_dict(warnings=False) for item in short.output]
        made = await client.responses.create(
            model="fake",
            input=[*again, {"role": "user", "content": "go on"}],  # type: ignore[list-item]
            max_output_tokens=4,
        )
        assert made.output


async def test_a_compacted_conversation_keeps_what_the_user_said(served: Served) -> None:
    first = await create(served, input="I am Ann.")
    body = {"previous_response_id": first["id"], "input": TURNS, "model": "fake"}
    response = await served.client.post("/v1/responses/compact", json=body)
    assert response.status_code == 200, response.text
    output = response.json()["output"]
    assert [item["type"] for item in output] == ["message"] * 3 + ["compaction"]
    texts = [item["content"][0]["text"] for item in output[:3]]
    assert texts == ["I am Ann.", "hi", "and?"]
    asked = await count(
        served,
        previous_response_id=first["id"],
        input=[*TURNS, {"role": "user", "content": REQUEST}],
    )
    assert response.json()["usage"]["input_tokens"] == asked
    conversation = await begin(served, *output)
    assert (await create(served, conversation=conversation, input="so?"))["output"]


def test_a_summary_is_read_as_the_assistants_turn() -> None:
    item = item_of("Ann wants é.")
    assert "Ann" not in json.dumps(item)
    turns = chat(input=[TURNS[0], item, TURNS[4]]).conversation()
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "hi"), ("assistant", "Ann wants é."), ("user", "and?")
    ]  # fmt: skip
    kept = InputItem(**item)
    assert summary_of(kept, "input[0]") == "Ann wants é."


@pytest.mark.parametrize("route", ["input_tokens", "compact"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]"),
        ({"input": "hi", "nonsense": 1}, 400, "nonsense"),
        ({"input": "hi", "previous_response_id": "resp_no"}, 404, "previous_response_id"),
        ({"input": "hi", "previous_response_id": "x" * 65}, 400, "previous_response_id"),
        ({"input": "hi", "model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_read_is_named(
    served: Served, route: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await served.client.post(f"/v1/responses/{route}", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


async def test_other_keys_read_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        async with client_of(served, "one") as client:
            made = await client.responses.create(model="fake", input="hi", max_output_tokens=2)
        async with client_of(served, "two") as client:
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_tokens.count(input="a", previous_response_id=made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.compact(model="fake", previous_response_id=made.id)


async def test_a_conversation_that_does_not_fit_is_refused(served: Served) -> None:
    body = {**ASK, "input": "x" * 600}
    body.pop("max_output_tokens")
    body.pop("ignore_eos")
    response = await served.client.post("/v1/responses/compact", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert await count(served, **body) > 512
