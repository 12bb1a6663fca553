"""Requests as Claude Code 2.1 and Codex 0.169 send them, with every field that they set."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.formats.events import ArgumentsPiece, CallBegin, CallEnd
from vllmx_server.apis.responses.output import Output
from vllmx_server.apis.responses.tools import forms_of

from .conftest import MakeServer
from .test_messages import named_events
from .test_responses import chat

EPHEMERAL = {"type": "ephemeral"}
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string"},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
CLAUDE_CODE = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>\n\n"},
            {"type": "text", "text": "Read it.", "cache_control": EPHEMERAL}]},
        {"role": "system", "content": "Available agents: none"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "call_1", "name": "Read", "input": {"file_path": "a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "content": "No such file.", "is_error": True,
             "tool_use_id": "call_1", "cache_control": EPHEMERAL}]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
    ],
    "tools": [READ],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}  # fmt: skip
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {
            "type": "function",
            "name": "close",
            "strict": False,
            "description": "Ends one.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
        }
    ],
}
EXEC = {
    "type": "function",
    "name": "exec_command",
    "strict": False,
    "description": "Runs it.",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
}
PATCH = "*** Begin Patch\n*** Delete File: a\n*** End Patch\n"
CODEX = {
    "model": "fake",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer",
         "content": [{"type": "input_text", "text": "You are a coding agent."}]},
        {"type": "message", "id": "msg_2", "role": "user",
         "content": [{"type": "input_text", "text": "Patch it."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "status": "completed", "id": "fc_1", "name": "close",
         "namespace": "agents", "arguments": "{}", "call_id": "call_1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "done"},
        {"type": "custom_tool_call", "status": "completed", "id": "ctc_1", "call_id": "call_2",
         "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_2", "output": "done"},
        {"type": "message", "status": "completed", "id": "msg_3", "role": "assistant",
         "content": [{"type": "output_text", "text": "Ok.", "annotations": [], "logprobs": []}]},
        {"type": "message", "id": "msg_4", "role": "user",
         "content": [{"type": "input_text", "text": "Thanks."}]},
    ],
    "tools": [
        EXEC, APPLY_PATCH, AGENTS,
        {"type": "tool_search", "execution": "client", "description": "d",
         "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": True,
         "search_content_types": ["text", "image"]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20744",
    "client_metadata": {"x-codex-turn-metadata": "{}", "x-codex-window-id": "0"},
}  # fmt: skip


async def test_both_are_answered(make_server: MakeServer) -> None:
    betas = "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24"
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": betas,
        "x-app": "cli",
        "x-codex-beta-features": "remote_compaction_v2",
        "originator": "codex_exec",
        "authorization": "Bearer none",
    }
    async with make_server(max_model_len=1024) as served:
        for path, body, last in (
            ("/v1/messages?beta=true", CLAUDE_CODE, "message_stop"),
            ("/v1/responses", CODEX, r"response\.(completed|incomplete)"),
        ):
            response = await served.client.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            assert re.fullmatch(last, named_events(response.text)[-1][0])
        counted = {key: CLAUDE_CODE[key] for key in ("model", "messages", "system", "tools")}
        response = await served.client.post(
            "/v1/messages/count_tokens?beta=true", json=counted, headers=headers
        )
        assert response.json()["input_tokens"] > 100


def test_custom_tools_and_namespaces_are_functions() -> None:
    made = chat(**CODEX)
    functions = [tool["function"] for tool in made.chat_options().tools or ()]
    assert [function["name"] for function in functions] == [
        "exec_command",
        "apply_patch",
        "agents.close",
    ]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert functions[1]["description"].endswith('start: "*** Begin Patch"')
    calls = [
        call["function"]
        for message in made.conversation()
        for call in message.get("tool_calls") or ()
    ]
    assert [call["name"] for call in calls] == ["agents.close", "apply_patch"]
    assert calls[1]["arguments"] == {"input": PATCH}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0]"),
        ({"type": "custom", "name": "a", "format": 1}, "tools[0].format"),
        ({"type": "namespace", "name": "a"}, "tools[0]"),
        ({"type": "namespace", "name": "a", "tools": [1]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "function"}]}, "tools[0].tools[0]"),
        ({"type": "custom", "name": "a b"}, "tools[0].name"),
    ],
)
def test_tools_that_are_none_are_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        chat(tools=[tool])
    assert error.value.param == param


def test_calls_are_told_of_as_their_tools() -> None:
    output = Output(forms=forms_of(CODEX["tools"]))
    told = []
    for call_id, name, arguments in (
        ("c1", "apply_patch", json.dumps({"input": PATCH})),
        ("c2", "apply_patch", '{"input": "cu'),  # cut by the length
        ("c3", "agents.close", "{}"),
        ("c4", "exec_command", "{}"),
    ):
        pieces = [ArgumentsPiece(0, arguments[:5]), ArgumentsPiece(0, arguments[5:])]
        for event in (CallBegin(0, call_id, name), *filter(lambda p: p.text, pieces), CallEnd(0)):
            told += output.take(event)
    custom, cut, close, plain = output.items
    assert (custom["type"], custom["name"], custom["input"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
    )
    assert cut["input"] == '{"input": "cu'
    assert (close["type"], close["name"], close["namespace"]) == (
        "function_call",
        "close",
        "agents",
    )
    assert (plain["name"], "namespace" in plain) == ("exec_command", False)
    assert [name for name, _ in told[:4]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
