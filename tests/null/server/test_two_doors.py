"""Conversations are checked in one place: HTTP and Python take and refuse the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat import ChatOptions
from vllmx_engine.text.chat_template import ChatTemplate

from .conftest import MakeServer, Served

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


TAKEN: tuple[list[Any], ...] = (
    [user("x")],
    [user("")],
    [user(["x", {"type": "text", "text": "y"}])],
    [user("x"), assistant("y", tool_calls=[])],
    [user("x"), assistant("y", tool_calls=None)],
    [user("x"), assistant(tool_calls=[CALL]), {"role": "tool", "content": None}],
    [user("x"), assistant(tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])],
    [user("x"), assistant(tool_calls=[{"function": {"name": "f", "arguments": ""}}])],
    [user("x"), assistant(tool_calls=[{"function": {"name": "f"}}])],
    [user("x"), assistant("y", audio=None, function_call=None, refusal=None, reasoning=None)],
    [user("x"), assistant("y", reasoning_content="z", name="n")],
    [{"role": "developer", "content": "x"}, user("y")],
    [user("x"), assistant(function_call={"name": "f", "arguments": "{}"})],
    [user("x"), assistant(refusal="no")],
    [user("x"), assistant(audio={"id": "a", "transcript": "y"})],
    [user("x"), assistant([{"type": "thinking", "thinking": "z"}, {"type": "text", "text": "y"}])],
    [user("x"), assistant([{"type": "redacted_thinking", "data": "z"}])],
    [user("x"), assistant([{"type": "refusal", "refusal": "no"}])],
    [user([{"type": "output_text", "text": "x"}])],
    [user([{"type": "input_text", "text": "x"}])],
    [user("x"), assistant([{"type": "tool_use", "id": "a", "name": "f"}], tool_calls=[CALL])],
    [user("x"), assistant("y", reasoning={"a": 1}, thinking_blocks=[{"thinking": "z"}])],
)
REFUSED: tuple[tuple[list[Any], str], ...] = (
    ([], "messages"),
    ([user(None)], "messages[0].content"),
    ([user([])], "messages[0].content"),
    ([user([{"type": "input_audio", "input_audio": {"data": "x"}}])], "messages[0].content[0]"),
    ([user([{"type": "video_url", "video_url": {"url": "x"}}])], "messages[0].content[0]"),
    ([user("x"), assistant([{"type": "nonsense"}])], "messages[1].content"),
    ([user([{"type": "file", "file": {"file_id": "x"}}])], "messages[0].content"),
    ([user([{"type": "text"}])], "messages[0].content"),
    ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
    ([{"role": "boss", "content": "x"}], "messages[0].role"),
    ([user("x"), assistant("y", audio={"id": "a"})], "messages[1].audio"),
    ([user("x"), assistant("y", function_call={"arguments": "{}"})], "messages[1].function_call"),
)
WRONG_TYPES: tuple[list[Any], ...] = (
    ["x"],
    [{"content": "x"}],
    [{"role": 5, "content": "x"}],
    [user(5)],
    [user({"a": 1})],
    [user([5])],
    [user([{}])],
    [user("x", name=5)],
    [user("x"), assistant("y", tool_calls="z")],
    [user("x"), assistant("y", tool_calls=[{}])],
    [user("x"), assistant("y", tool_calls=[{"function": {"name": 5}}])],
    [user("x"), assistant("y", tool_calls=[{"function": {"name": "f", "arguments": 5}}])],
    [user("x"), assistant("y", reasoning_content=5)],
    [user("x"), {"role": "tool", "content": "y", "tool_call_id": 5}],
)


async def in_python(served: Served, messages: Any, chat: ChatOptions | None = None) -> list[int]:
    """The prompt's ids. Raises what the engine raises."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    async with await served.llm.submit_chat(messages, params, chat=chat) as stream:
        return stream.prompt_token_ids


async def test_conversations_that_both_take(served: Served) -> None:
    template = ChatTemplate.from_tokenizer(served.llm.tokenizer)
    for messages in TAKEN:
        response = await served.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert response.status_code == 200, (messages, response.text)
        ids = await in_python(served, messages)
        assert len(ids) == response.json()["usage"]["prompt_tokens"]
        assert served.llm.tokenizer.encode(template.render(messages)) == ids


async def test_conversations_that_both_refuse(served: Served) -> None:
    template = ChatTemplate.from_tokenizer(served.llm.tokenizer)
    for messages, param in [*REFUSED, *((each, None) for each in WRONG_TYPES)]:
        response = await served.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert response.status_code == 400, messages
        told = response.json()["error"]["param"]
        with pytest.raises(InvalidRequestError) as caught:
            await in_python(served, messages)
        if param is not None:
            assert told == caught.value.param == param
            assert messages == [] or response.json()["error"]["message"] == caught.value.message
        if param != "messages[0].content[0]":  # templates are given images by those who took them
            with pytest.raises(InvalidRequestError):
                template.render(messages)


async def test_unknown_parts_are_named(served: Served) -> None:
    for kind in ("file", "nonsense"):
        with pytest.raises(InvalidRequestError, match=rf"part of type '{kind}'.*: send its text"):
            await in_python(served, [user(["x", {"type": kind, kind: "y"}])])
    ids = await in_python(
        served, [user([{"type": "text", "text": "x", "cache_control": {"a": 1}}])]
    )
    assert ids == await in_python(served, [user("x", unknown=[1])])


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        ["x"],
        [{}],
        [{"name": "f"}],
        [{"type": "custom", "function": {"name": "f"}}],
        [TOOL, TOOL],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f", "parameters": 5}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
    ],
)
async def test_tools_that_both_refuse(served: Served, tools: Any) -> None:
    response = await served.post("/v1/chat/completions", messages=[user("x")], tools=tools)
    assert response.status_code == 400
    with pytest.raises(InvalidRequestError, match=r"^tools"):
        ChatOptions(tools=tools)


async def test_choices_and_variables(served: Served) -> None:
    options = {"messages": [user("x")], "tools": [TOOL], "max_tokens": 1}
    for choice in ("auto", "none", None):
        response = await served.post("/v1/chat/completions", tool_choice=choice, **options)
        assert response.status_code == 200
    assert ChatOptions(tools=[TOOL], tool_choice="none").shown_tools is None
    assert ChatOptions(tools=[{"function": {"name": "f"}}]).shown_tools == [TOOL]
    await in_python(served, [user("x")], ChatOptions(tools=[TOOL], tool_choice="none"))
    for name in ("messages", "tools", "template"):
        variables = {name: 1}
        response = await served.post(
            "/v1/chat/completions", messages=[user("x")], chat_template_kwargs=variables
        )
        assert response.status_code == 400
        with pytest.raises(InvalidRequestError) as caught:
            ChatOptions(template_kwargs=variables)
        assert response.json()["error"]["message"] == caught.value.message


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gpt-oss", {"parameters": {"type": "object", "properties": {}}}),
        ("seed-oss", {"description": "d", "parameters": {}}),
        ("gpt-oss", {"description": None, "parameters": None}),
        (
            "apertus",
            {"parameters": {"type": "object", "properties": {"n": {"enum": [1, 2], "default": 1}}}},
        ),
    ],
)
async def test_tools_without_optional_fields(
    make_server: MakeServer, name: str, function: dict[str, Any]
) -> None:
    template = str(TEMPLATES / f"{name}.jinja")
    tools = [{"type": "function", "function": {"name": "f1", **function}}]
    async with make_server(engine={"chat_template": template}, max_model_len=16384) as served:
        body = {"messages": [user("hi")], "tools": tools, "max_tokens": 1}
        response = await served.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
