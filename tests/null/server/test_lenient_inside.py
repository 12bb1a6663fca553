"""Unknown keys inside of messages, parts and tools are ignored; unknown parameters are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Served
from .test_schema import chat_request

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
EXTRAS: dict[str, Any] = {
    "id": "msg_1",
    "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {"a": [1, {"b": None}]},
    "metadata": {},
    "stop_reason": None,
    "token_ids": None,
    "prefix": False,
    "detail": 3.0,
    "annotations": "none",
    "extra_content": {"google": {"thought_signature": "s"}},
}


def bodies(extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A request of each route with `extra` in all objects inside of it."""
    text = {"type": "text", "text": "hi", **extra}
    call = {**CALL, **extra, "function": {**CALL["function"], **extra}}  # type: ignore[dict-item]
    of_chats = [
        {"role": "user", "content": [text], **extra},
        {"role": "assistant", "content": "ho", "tool_calls": [call], **extra},
        {"role": "tool", "content": [text], "tool_call_id": "c1", **extra},
    ]
    tool = {"type": "function", "function": {**FUNCTION, **extra}, **extra}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text]}
    of_messages = [
        {"role": "user", "content": [text], **extra},
        {"role": "assistant", "content": [{**text, "text": "ho"}, {**extra, **use}], **extra},
        {"role": "user", "content": [{**extra, **result}], **extra},
    ]
    own = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    items = [
        {"type": "message", "role": "user", "content": [{**text, "type": "input_text"}], **extra},
        {**extra, "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {**extra, "type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    flat = {"type": "function", **FUNCTION, **extra}
    return {
        CHAT: {"messages": of_chats, "tools": [tool], "max_tokens": 1},
        "/tokenize": {"messages": of_chats, "tools": [tool]},
        MESSAGES: {"messages": of_messages, "tools": [{**own, **extra}], "max_tokens": 1},
        MESSAGES + "/count_tokens": {"messages": of_messages, "tools": [{**own, **extra}]},
        RESPONSES: {"input": items, "tools": [flat], "max_output_tokens": 1},
    }


async def test_unknown_keys_change_no_prompt(served: Served) -> None:
    """Not even the one of tools, which templates print."""
    for path, plain in bodies({}).items():
        answers = []
        for body in (plain, *(bodies({name: EXTRAS[name]})[path] for name in EXTRAS)):
            response = await served.client.post(path, json=body)
            assert response.status_code == 200, (path, body, response.text)
            found = response.json()
            usage = found.get("usage") or {}
            answers.append(
                [found.get(name) for name in ("count", "input_tokens", "tokens")]
                + [usage.get("prompt_tokens"), usage.get("input_tokens")]
            )
        assert [each for each in answers if each != answers[0]] == [], path


async def test_unknown_parameters_are_refused_by_name(served: Served) -> None:
    for path, body in bodies(EXTRAS).items():
        if path == RESPONSES:
            body = {"input": "hi"}
        response = await served.client.post(path, json={**body, "thread": {"type": "create"}})
        assert response.status_code == 400, (path, response.text)
        assert "unknown field 'thread'" in response.json()["error"]["message"]


async def test_a_beta_header_brings_parameters_that_come_and_go(served: Served) -> None:
    for path in (MESSAGES, MESSAGES + "/count_tokens"):
        body = {**bodies({})[path], "thread": {"type": "create"}, "diagnostics": {"a": 1}}
        if path != MESSAGES:
            del body["diagnostics"]
        headers = {"anthropic-beta": "tool-runner"}
        response = await served.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        blank = await served.client.post(path, json=body, headers={"anthropic-beta": ""})
        assert blank.status_code == 400
        for wrong in ({"tools": 5}, {"messages": []}, {"mcp_servers": [{"url": "http://x"}]}):
            response = await served.client.post(path, json=body | wrong, headers=headers)
            assert response.status_code == 400, "what is known is checked"
    response = await served.client.post(
        CHAT, json={**bodies({})[CHAT], "thread": 1}, headers={"anthropic-beta": "x"}
    )
    assert response.status_code == 400, "of this API alone"


async def test_the_form_of_an_answer_by_its_name_in_the_beta(served: Served) -> None:
    schema = {"type": "json_schema", "schema": {"const": 7}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    response = await served.client.post(MESSAGES, json={**body, "output_format": schema})
    assert response.status_code == 200, response.text
    assert response.json()["content"] == [{"type": "text", "text": "7"}]
    no_type = {"output_format": {"schema": {}}}
    assert (await served.client.post(MESSAGES, json={**body, **no_type})).status_code == 400
    both = {"output_format": schema, "output_config": {"format": {**schema, "schema": {}}}}
    assert (await served.client.post(MESSAGES, json={**body, **both})).status_code == 400


@pytest.mark.parametrize(
    ("turn", "seen"),
    [
        ({"content": "ho", "reasoning_content": "hm"}, {"reasoning_content": "hm"}),
        ({"content": "ho", "reasoning": "hm"}, {"reasoning_content": "hm"}),
        ({"content": "ho", "reasoning": {"effort": "low"}, "reasoning_details": [{}]}, {}),
        (
            {"content": "ho", "thinking_blocks": [{"type": "thinking", "thinking": "hm"}, {}, 5]},
            {"reasoning_content": "hm"},
        ),
        ({"content": "ho", "thinking_blocks": None}, {}),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "ho"},
                ]
            },
            {"content": [{"type": "text", "text": "ho"}], "reasoning_content": "hm"},
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "reasoning", "text": "m"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "output_text", "text": "ho", "annotations": []},
                ]
            },
            {"content": [{"type": "text", "text": "ho"}], "reasoning_content": "hm"},
        ),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, {"content": None}),
        ({"content": []}, {"content": None}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": "ho", "refusal": None}, {"content": "ho"}),
        (
            {"content": [{"type": "refusal", "refusal": "no"}]},
            {"content": [{"type": "text", "text": "no"}]},
        ),
        ({"content": None, "audio": {"id": "a", "transcript": "ho"}}, {"content": "ho"}),
        ({"content": "ho", "audio": None, "function_call": None, "tool_calls": None}, {}),
        ({"content": "ho", "annotations": [], "tool_calls": [], "function_call": {}}, {}),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"tool_calls": [{"type": "function", "function": CALL["function"]}]},
        ),
        ({"content": None, "tool_calls": [{**CALL, "type": None, "index": 0}]}, {}),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": None}}]},
            {"content": None},
        ),
    ],
)
async def test_history_of_any_provider_renders(
    served: Served, turn: dict[str, Any], seen: dict[str, Any]
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", **turn}]
    message = chat_request(messages=talk).conversation()[1]
    assert {name: message.get(name) for name in seen} == seen
    if "reasoning_content" not in seen and "thinking" not in json.dumps(turn):
        assert "reasoning_content" not in message
    body = {"messages": [*talk, talk[0]], "max_tokens": 1}
    response = await served.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("user", {"type": "nonsense", "text": "x"}),
        ("user", {"type": "video_url", "video_url": {"url": "http://x"}}),
        ("user", {"type": "file", "file": {}, "text": "x"}),
        ("user", {"type": "thinking", "thinking": "x"}),
        ("user", {"type": "refusal", "refusal": "x"}),
        ("assistant", {"type": "nonsense", "text": "x"}),
        ("assistant", {"type": "refusal"}),
        ("assistant", {"type": "text", "text": None}),
    ],
)
async def test_unknown_parts_stay_refused(served: Served, role: str, part: dict[str, Any]) -> None:
    talk = [{"role": role, "content": [part]}, {"role": "user", "content": "hi"}]
    response = await served.client.post(CHAT, json={"messages": talk, "max_tokens": 1})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("messages[0].content")
    if part["type"] == "nonsense":
        for path in (MESSAGES, RESPONSES):
            rest = {"input": talk} if path == RESPONSES else {"messages": talk, "max_tokens": 1}
            assert (await served.client.post(path, json=rest)).status_code == 400, path
