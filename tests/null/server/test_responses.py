"""OpenAI's Responses: items, events, what is kept and for whom."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    ReasoningPiece,
)
from vllmx_server.apis.responses import store as stored
from vllmx_server.apis.responses.as_chat import chat_of
from vllmx_server.apis.responses.output import Output
from vllmx_server.apis.responses.schema import RESPONSES
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.generating.chat_body import ChatCompletionRequest
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent
from vllmx_server.schema.decode import decode

from .conftest import JSON, MakeServer, Served
from .loop_meter import shortest_hold
from .test_messages import named_events

ASK = {"input": "hi", "max_output_tokens": 6, "ignore_eos": True}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "warm"}


CALLED = {"type": "function", "name": "f"}
SEARCH = {"type": "web_search"}
ALLOWED = {"type": "allowed_tools", "tools": [SEARCH]}


def chat(**body: Any) -> ChatCompletionRequest:
    asked = decode(json.dumps({**ASK, **body}).encode(), RESPONSES)
    asked.check()
    return chat_of(asked, ())


async def create(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/responses", json={**ASK, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_items_become_messages() -> None:
    made = chat(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "look it up"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "warm"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "noon"}]},
            {"role": "developer", "content": "go on"},
        ],
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}},
               {"type": "web_search"}],
    )  # fmt: skip
    system, user, assistant, warm, noon, developer = made.conversation()
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "weather?"}
    assert assistant["reasoning_content"] == "look it up"
    assert assistant["content"] == "Wait."
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert warm == {"role": "tool", "content": "warm", "name": "weather", "tool_call_id": "c1"}
    assert noon == {"role": "tool", "content": "noon", "name": "time", "tool_call_id": "c2"}
    assert developer["role"] == "developer"
    (tool,) = made.chat_options().tools or ()
    assert tool["function"]["name"] == "weather"


def test_images_are_parts_of_messages() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    text = {"type": "input_text", "text": "what?"}
    (user,) = chat(input=[{"role": "user", "content": [text, image]}]).conversation()
    assert user["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]


def test_images_that_tools_return_are_the_users() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    text = {"type": "input_text", "text": "a cat"}
    calls = [
        {"type": "function_call", "call_id": each, "name": "look", "arguments": "{}"}
        for each in ("a", "b")
    ]
    outputs = [
        {"type": "function_call_output", "call_id": "a", "output": [text, image]},
        {"type": "function_call_output", "call_id": "b", "output": "nothing"},
    ]
    shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    for later in ([], [{"role": "user", "content": "And?"}]):
        found = chat(input=[*calls, *outputs, *later]).conversation()
        assert [each["role"] for each in found[:4]] == ["assistant", "tool", "tool", "user"]
        assert [each["content"] for each in found[1:4]] == ["a cat", "nothing", shown]
        assert len(found) == 4 + len(later)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [RESULT, CALL]}, "input[0]"),
        ({"input": [CALL, {**RESULT, "call_id": "c2"}]}, "input[1]"),
        (
            {"input": [CALL, {**RESULT, "type": "custom_tool_call_output", "call_id": ""}]},
            "input[1]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "u"}]}]},
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_logprobs": -5}, "top_logprobs"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": {"name": "c"}}, "conversation"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {**ALLOWED, "mode": "required"}}, "tool_choice.tools"),
        ({"tool_choice": {**ALLOWED, "mode": "auto"}}, "tool_choice.tools[0]"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"previous_response_id": "x" * 65}, "previous_response_id"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_served_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        chat(**body)
    assert (info.value.param or "").startswith(param)


def test_what_may_be_called_is_told_in_the_form_of_chats() -> None:
    """Tools that OpenAI's servers run are left out there, and those of a namespace are functions
    with its name in front."""

    def names(*tools: dict[str, Any]) -> Any:
        inner = [{"type": "function", "name": name} for name in ("a", "b")]
        space = {"type": "namespace", "name": "n", "tools": inner}
        custom = {"type": "custom", "name": "c"}
        choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
        return chat(tools=[SEARCH, space, custom], tool_choice=choice).chat_options().allowed_tools

    assert names({"type": "custom", "name": "c"}, SEARCH) == ["c"]
    assert names({"type": "namespace", "name": "n"}) == ["n.a", "n.b"]
    assert names({"type": "function", "name": "a", "namespace": "n"}) == ["n.a"]
    nothing = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    assert chat(tools=[SEARCH, CALLED], tool_choice=nothing).callable_tools is None


EVENTS: list[ChatEvent] = [
    ReasoningPiece("I "),
    ReasoningPiece("see"),
    ContentPiece("Look"),
    ContentPiece("ing."),
    CallBegin(0, "call_1", "f"),
    ArgumentsPiece(0, '{"a":'),
    ArgumentsPiece(0, "1}"),
    CallEnd(0),
    AnswerEnd("tool_calls", None),
]


def test_events_come_to_the_items() -> None:
    """Events are put together as a client does."""
    output = Output()
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in EVENTS:
        for name, fields in output.take(event):
            fields = json.loads(json.dumps(fields))
            if name == "output_item.added":
                assert fields["output_index"] == len(items)
                items.append(fields["item"])
                continue
            item = items[fields["output_index"]]
            assert fields.get("item_id", item["id"]) == item["id"]
            if name == "content_part.added":
                item["content"].append(fields["part"])
            elif name == "function_call_arguments.delta":
                item["arguments"] += fields["delta"]
            elif name.endswith(".delta"):
                item["content"][fields["content_index"]]["text"] += fields["delta"]
            elif name in ("output_text.done", "reasoning_text.done"):
                assert item["content"][0]["text"] == fields["text"]
            elif name == "function_call_arguments.done":
                assert item["arguments"] == fields["arguments"] == '{"a":1}'
            elif name == "output_item.done":
                item["status"] = "completed"
                done.append(fields["item"])
    assert items == done == output.items
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "I see"}]


async def test_a_response_is_found_again(served: Served) -> None:
    made = await create(served, metadata={"a": "b"}, instructions="Be brief.")
    assert made["status"] == "incomplete"
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["usage"]["output_tokens"] == 6
    path = f"/v1/responses/{made['id']}"
    assert (await served.client.get(path)).json() == made
    listed = (await served.client.get(path + "/input_items")).json()
    (item,) = listed["data"]
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert (await served.client.delete(path)).json()["deleted"] is True
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("POST", path + "/cancel"),
        ("GET", path + "/input_items"),
    ):
        gone = await served.client.request(method, where)
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "response_not_found"


async def test_input_items_in_pages(served: Served) -> None:
    items = [{"role": "user", "content": str(i), "id": f"m{i}"} for i in range(5)]
    path = f"/v1/responses/{(await create(served, input=items))['id']}/input_items"

    async def page(query: str) -> tuple[list[str], bool]:
        found = (await served.client.get(f"{path}?{query}")).json()
        return [each["id"] for each in found["data"]], found["has_more"]

    assert await page("") == (["m4", "m3", "m2", "m1", "m0"], False)
    assert await page("order=asc&limit=2") == (["m0", "m1"], True)
    assert await page("order=asc&after=m1&limit=3") == (["m2", "m3", "m4"], False)
    assert await page("after=none") == ([], False)
    assert (await served.client.get(f"{path}?limit=101")).status_code == 400


async def test_streamed_and_whole_are_one_answer(served: Served) -> None:
    whole = await create(served, seed=3)
    response = await served.client.post("/v1/responses", json={**ASK, "seed": 3, "stream": True})
    events = named_events(response.text)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(event["type"] == name for name, event in events)
    final = events[-1][1]["response"]
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert final["usage"] == whole["usage"]
    assert (await served.client.get(f"/v1/responses/{final['id']}")).json() == final


async def test_log_probabilities_are_told_once(served: Served) -> None:
    """The stream has them with the text, and its end all of them; without `include` there are
    none."""
    asked = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 3, "seed": 3}
    whole = await create(served, **asked)
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == 6
    data = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
    assert data.decode("utf-8", "replace") == part["text"]
    assert all(len(each["top_logprobs"]) == 3 for each in part["logprobs"])
    response = await served.client.post("/v1/responses", json={**asked, "stream": True})
    events = dict(named_events(response.text))
    deltas = [e for name, e in named_events(response.text) if name == "response.output_text.delta"]
    assert [each for delta in deltas for each in delta["logprobs"]] == part["logprobs"]
    assert events["response.output_text.done"]["logprobs"] == part["logprobs"]
    assert events["response.incomplete"]["response"]["output"][0]["content"] == [part]
    plain = await create(served, **{**asked, "include": []})
    assert plain["output"][0]["content"][0]["logprobs"] == []
    without = {"format": {"type": "json_schema", "name": "x"}}
    refused = await served.client.post("/v1/responses", json={**ASK, "text": without})
    assert refused.json()["error"]["param"] == "text.format"
    assert "text.format" in refused.json()["error"]["message"]
    many = await served.client.post("/v1/responses", json={**asked, "top_logprobs": 21})
    assert many.json()["error"]["param"] == "top_logprobs"


async def test_conversations_are_told_again(served: Served) -> None:
    """What the model sees is the same as if the client had sent all of it."""
    first = await create(served)
    second = await create(served, input="and?", previous_response_id=first["id"])
    third = await create(served, input="so?", previous_response_id=second["id"])
    by_hand = await create(
        served,
        input=[
            {"role": "user", "content": "hi"},
            *first["output"],
            {"role": "user", "content": "and?"},
            *second["output"],
            {"role": "user", "content": "so?"},
        ],
    )
    assert third["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    await served.client.delete(f"/v1/responses/{first['id']}")
    response = await served.client.post(
        "/v1/responses", json={**ASK, "previous_response_id": third["id"]}
    )
    assert response.status_code == 404, "a part of the conversation is gone"


async def test_chains_are_bounded(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_server({"max_body_bytes": 15_000}) as served:
        monkeypatch.setattr(stored, "MAX_CHAIN", 3)
        previous = None
        for _ in range(4):
            previous = (await create(served, previous_response_id=previous))["id"]
        ask = {**ASK, "previous_response_id": previous}
        response = await served.client.post("/v1/responses", json=ask)
        assert response.status_code == 400
        assert "over 3 responses" in response.json()["error"]["message"]
        big = {"metadata": {str(i): "x" * 512 for i in range(16)}}
        first = await create(served, **big)
        second = await create(served, previous_response_id=first["id"], **big)
        ask = {**ASK, "previous_response_id": second["id"]}
        response = await served.client.post("/v1/responses", json=ask)
        assert "15000 bytes" in response.json()["error"]["message"], response.text
        assert response.json()["error"]["param"] == "previous_response_id"


async def test_other_keys_see_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = (await served.client.post("/v1/responses", json=ASK, headers=one)).json()
        path = f"/v1/responses/{made['id']}"
        for method, where in (
            ("GET", path),
            ("GET", path + "?stream=true"),
            ("GET", path + "/input_items"),
            ("POST", path + "/cancel"),
            ("DELETE", path),
        ):
            assert (await served.client.request(method, where, headers=two)).status_code == 404
        ask = {**ASK, "previous_response_id": made["id"]}
        stolen = await served.client.post("/v1/responses", json=ask, headers=two)
        assert stolen.status_code == 404
        assert (await served.client.get(path, headers=one)).status_code == 200


async def test_the_oldest_make_room(make_server: MakeServer) -> None:
    async with make_server({"max_stored_bytes": 10_000}) as served:
        ids = [(await create(served, input="x" * 200))["id"] for _ in range(12)]
        kept = [
            name
            for name in ids
            if (await served.client.get(f"/v1/responses/{name}")).status_code == 200
        ]
        assert 0 < len(kept) < 12
        assert kept == ids[-len(kept) :]


async def test_what_a_server_left_open_has_failed(make_server: MakeServer, tmp_path: Any) -> None:
    folder = {"data_dir": str(tmp_path / "data")}
    async with make_server(folder) as served:
        made = await create(served)
        left = await served.state.store(KeptResponses).responses.get("", made["id"])
        left.response["status"] = "in_progress"
        await served.state.store(KeptResponses).responses.save("", left)
    async with make_server(folder) as served:
        found = (await served.client.get(f"/v1/responses/{made['id']}")).json()
        assert found["status"] == "failed"
        assert "the server ended" in found["error"]["message"]


async def test_a_stream_that_fails_says_so(make_server: MakeServer) -> None:
    async with make_server(step_s=0.01) as served:
        body = {**ASK, "max_output_tokens": 400, "stream": True}
        text = ""
        async with served.client.stream("POST", "/v1/responses", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if "output_text.delta" in text:
                    await served.llm.shutdown()
        events = named_events(text)
        name, last = events[-1]
        assert name == "response.failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert last["response"]["output"][0]["status"] == "incomplete"


async def test_a_long_conversation_holds_nobody(served: Served) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 5}] * 4000
    data = json.dumps({**ASK, "input": items})
    meter, response = await shortest_hold(
        lambda: served.client.post("/v1/responses", content=data, headers=JSON), 20
    )
    assert response.status_code == 400
    assert meter.longest_ms < 20, meter.what
