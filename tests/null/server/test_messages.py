"""Anthropic's Messages: translation, answers, events, errors."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    ReasoningPiece,
)
from vllmx_server.apis.messages.answers import Stop
from vllmx_server.apis.messages.as_chat import chat_of
from vllmx_server.apis.messages.blocks import BlockEvents, Blocks
from vllmx_server.apis.messages.schema import MESSAGES
from vllmx_server.generating.chat_body import ChatCompletionRequest
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent
from vllmx_server.schema.decode import decode

from tests.waiting import PATIENCE_S

from .conftest import JSON, MakeServer, Served
from .loop_meter import shortest_hold

HELLO = {
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hi"}],
    "ignore_eos": True,  # the fake model may draw its end of sequence at any time
}


RESULT = {"type": "tool_result", "content": "x"}
BUDGET = "thinking.budget_tokens"


def thinks(budget_tokens: int) -> dict[str, Any]:
    return {"type": "enabled", "budget_tokens": budget_tokens}


def chat(**body: Any) -> ChatCompletionRequest:
    asked = decode(json.dumps({**HELLO, **body}).encode(), MESSAGES)
    asked.check()
    found = chat_of(asked)
    found.check()
    return found


def named_events(text: str) -> list[tuple[str, Any]]:
    """The data of each event of a streamed body, with its name."""
    found = re.findall(r"event: ([\w.]+)\ndata: (.*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    return [(name, json.loads(data)) for name, data in found]


def test_a_conversation_with_tools_becomes_one_of_chats() -> None:
    made = chat(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "look it up", "signature": "x"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
    )
    system, user, assistant, result, again = made.conversation()
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "weather?"}
    assert assistant["content"] == "Wait."
    assert assistant["reasoning_content"] == "look it up"
    (called,) = assistant["tool_calls"]
    assert called["id"] == "c1"
    assert called["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert result == {
        "role": "tool",
        "content": "Error: no",
        "name": "weather",
        "tool_call_id": "c1",
    }
    assert again == {"role": "user", "content": [{"type": "text", "text": "and now?"}]}
    (tool,) = made.chat_options().tools or ()
    assert tool["function"]["parameters"] == {"type": "object"}


def test_thinking_is_off_unless_it_is_asked_for() -> None:
    def switch(**body: Any) -> object:
        return chat(**body).chat_options().template_kwargs["enable_thinking"]

    assert switch() is False
    assert switch(thinking={"type": "disabled"}) is False
    assert switch(thinking=thinks(1024), max_tokens=1025) is True
    assert switch(thinking={"type": "adaptive"}) is True
    assert switch(chat_template_kwargs={"enable_thinking": True}) is True


def test_a_final_assistant_turn_is_continued() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    options = chat(messages=turns).chat_options()
    assert options.continue_final_message
    assert options.add_generation_prompt is False


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def test_images_become_data_urls() -> None:
    linked = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    text = {"type": "text", "text": "what?"}
    found = chat(messages=[{"role": "user", "content": [IMAGE, text, linked]}]).conversation()
    assert found[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        text,
        {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
    ]


def test_images_that_tools_return_are_the_users() -> None:
    text = {"type": "text", "text": "a cat"}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text, IMAGE]},
        {"type": "tool_result", "tool_use_id": "t2", "content": [IMAGE]},
    ]
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use, {**use, "id": "t2"}]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    found = chat(messages=turns).conversation()
    assert [each["role"] for each in found] == ["user", "assistant", "tool", "tool", "user"]
    assert [each["content"] for each in found[2:4]] == ["a cat", ""]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert found[4]["content"] == [image, image, {"type": "text", "text": "And?"}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "0 entries, at least 1"),
        ({"max_tokens": 0}, "max_tokens", "between 1 and"),
        ({"temperature": -1}, "temperature", "between 0 and 100, got -1"),
        ({"top_p": 1.5}, "top_p", "between 0 and 1, got 1.5"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        ({"nonsense": 1}, "nonsense", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source",
            "of type base64",
        ),
        (
            {"messages": [{"role": "assistant", "content": [IMAGE]}]},
            "messages[0].content[0]",
            "'image', which is not served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "lacks its text",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": "t9"}]}]},
            "messages[0].content[0].tool_use_id",
            "'t9', which is the id of no tool_use",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]",
            "web_search_20250305",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "needs the tool's name"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers", "not served"),
        ({"container": "c"}, "container", "not served"),
        ({"thinking": {"type": "enabled"}}, BUDGET, "'enabled' needs"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2048}}, BUDGET, "takes no"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, BUDGET, ">= 1024"),
        ({"thinking": thinks(1024), "max_tokens": 1024}, BUDGET, "less than max_tokens, 1024"),
    ],
)
def test_what_cannot_be_served_is_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        chat(**body)
    assert words in info.value.message
    assert info.value.param == param


EVENTS: list[ChatEvent] = [
    ReasoningPiece("I "),
    ReasoningPiece("see"),
    ContentPiece("Look"),
    ContentPiece("ing."),
    CallBegin(0, "toolu_1", "f"),
    ArgumentsPiece(0, '{"a":'),
    ArgumentsPiece(0, "1}"),
    CallEnd(0),
    CallBegin(1, "toolu_2", "g"),
    CallEnd(1),
    AnswerEnd("tool_calls", None),
]
CONTENT = [
    {"type": "thinking", "thinking": "I see", "signature": ""},
    {"type": "text", "text": "Looking."},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
]


def test_blocks_of_an_answer() -> None:
    blocks = Blocks()
    for event in EVENTS:
        blocks.add(event)
    assert msgspec.to_builtins(blocks.content) == CONTENT
    assert blocks.stop(False) == Stop(stop_reason="tool_use", stop_sequence=None)


def test_streamed_blocks_come_to_the_same() -> None:
    streamed = BlockEvents()
    text = b"".join(map(streamed.of, EVENTS)).decode()
    content: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    opened: int | None = None
    for name, event in named_events(text):
        assert event["type"] == name
        if name == "content_block_start":
            assert opened is None, "one block is open at a time"
            opened = event["index"]
            assert opened == len(content)
            content.append(event["content_block"])
        elif name == "content_block_delta":
            assert event["index"] == opened
            kind = event["delta"].pop("type")
            ((field, piece),) = event["delta"].items()
            if kind == "input_json_delta":
                inputs[opened] = inputs.get(opened, "") + piece
            else:
                content[opened][field] += piece
        else:
            assert name == "content_block_stop"
            assert event["index"] == opened
            opened = None
    for index, data in inputs.items():
        content[index]["input"] = json.loads(data)
    assert content == CONTENT
    assert streamed.stop(False).stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("end", "cut", "reason", "sequence"),
    [
        (AnswerEnd("stop", None), False, "end_turn", None),
        (AnswerEnd("stop", "END"), False, "stop_sequence", "END"),
        (AnswerEnd("stop", 7), False, "end_turn", None),
        (AnswerEnd("length", None), False, "max_tokens", None),
        (AnswerEnd("length", None), True, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ended(end: AnswerEnd, cut: bool, reason: str, sequence: str | None) -> None:
    blocks = Blocks()
    blocks.add(end)
    found = blocks.stop(cut)
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)


async def test_streamed_and_whole_are_one_answer(served: Served) -> None:
    body = {**HELLO, "max_tokens": 12, "seed": 3}
    whole = (await served.client.post("/v1/messages", json=body)).json()
    response = await served.client.post("/v1/messages", json={**body, "stream": True})
    events = named_events(response.text)
    assert [name for name, _ in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [name for name, _ in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(e["delta"]["text"] for name, e in events if name == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    start, end = events[0][1]["message"], events[-2][1]
    assert start["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert whole["stop_reason"] == "max_tokens"
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 12
    counted = await served.client.post(
        "/v1/messages/count_tokens", json={"messages": HELLO["messages"]}
    )
    usage = whole["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": prompt}


async def test_max_tokens_over_the_context_is_cut(served: Served) -> None:
    body = {**HELLO, "max_tokens": 32000}
    answer = (await served.client.post("/v1/messages", json=body)).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_errors_have_anthropics_shape(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("secret",)}) as served:
        key = {"x-api-key": "secret"}

        async def error(status: int, kind: str, path: str = "", **options: Any) -> str:
            response = await served.client.request(
                options.pop("method", "POST"), "/v1/messages" + path, **options
            )
            assert response.status_code == status, response.text
            assert response.headers["request-id"] == response.headers["x-request-id"]
            body = response.json()
            assert body["type"] == "error"
            assert body["error"]["type"] == kind
            return str(body["error"]["message"])

        await error(401, "authentication_error", json=HELLO)
        await error(404, "not_found_error", json={**HELLO, "model": "other"}, headers=key)
        await error(400, "invalid_request_error", content=b"{", headers={**key, **JSON})
        await error(400, "invalid_request_error", json={"messages": 3}, headers=key)
        await error(415, "invalid_request_error", content=b"{}", headers=key)
        await error(405, "invalid_request_error", method="GET", headers=key)
        await error(404, "not_found_error", "/nothing", json={}, headers=key)
        long = {**HELLO, "messages": [{"role": "user", "content": "x" * 9000}]}
        assert "512" in await error(400, "invalid_request_error", json=long, headers=key)
        served.state.admission.draining = True
        await error(503, "overloaded_error", json=HELLO, headers=key)


async def test_a_stream_that_fails_ends_with_an_error_event(make_server: MakeServer) -> None:
    async with make_server(step_s=0.01) as served:
        body = {**HELLO, "max_tokens": 400, "stream": True}

        async def read() -> AsyncIterator[str]:
            async with served.client.stream("POST", "/v1/messages", json=body) as response:
                async for line in response.aiter_lines():
                    yield line

        lines: list[str] = []
        async for line in read():
            lines.append(line)
            if line.startswith("event: content_block_delta"):
                await served.llm.shutdown()
        assert lines[-3] == "event: error"
        error = json.loads(lines[-2].removeprefix("data: "))
        assert error["type"] == "error"
        assert error["error"]["type"] == "overloaded_error"


async def test_a_budget_is_nothing_to_a_model_without_thoughts(served: Served) -> None:
    """With tools it is that of a turn, whose answers share it."""
    body = {"thinking": thinks(2000), "tools": [{"name": "f", "input_schema": {}}]}
    assert chat(**body).thinking_token_budget == 2000
    response = await served.client.post("/v1/messages", json={**HELLO, **body})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["output_tokens"] == 4


async def test_pings_are_anthropics(make_server: MakeServer, held_steps: threading.Event) -> None:
    async with make_server({"sse_ping_interval_s": 0.02}, step_s=3600.0) as served:
        body, text = {**HELLO, "stream": True}, ""
        async with served.client.stream("POST", "/v1/messages", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if text.count("event: ping") > 1:
                    held_steps.set()
        assert [event for _, event in named_events(text)].count({"type": "ping"}) > 1


async def test_a_large_conversation_holds_nobody(make_server: MakeServer) -> None:
    """Translated on a thread: twenty thousand blocks of a text."""
    blocks = [{"type": "text", "text": ""}] * 20_000
    body = {**HELLO, "messages": [{"role": "user", "content": [*blocks, {"type": "image"}]}]}
    async with make_server() as served:
        data = await asyncio.to_thread(msgspec.json.encode, body)
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            meter, response = await shortest_hold(
                lambda: client.post("/v1/messages", content=data, headers=JSON), 20
            )
        assert response.status_code == 400
        assert "20000" in response.json()["error"]["message"]
        assert meter.longest_ms < 20, meter.what
