"""Formats that checkpoints state themselves, in the forms that transformers takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.formats.answer_reader import AnswerReader, ReadOptions
from vllmx_engine.formats.choice import find_format
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.renderings import NotDerivedError
from vllmx_engine.formats.response_template import stated_format

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}
WHOLE = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TAGS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    },
    "transform": FUNCTION,
}
LAX = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
    "close": "<tool_call|>",
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": FUNCTION,
}
EACH = {
    "open": "[CALLS]",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{args}"}},
    "transform_each": True,
}
ONE = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"function": {"name": "{content.tool}", "arguments": "{content.args}"}},
}
EXAMPLES: list[tuple[dict[str, Any], str]] = [
    (WHOLE, '\n<tool_call>\n{"name": "f", "arguments": {"a": "x\\ny"}}\n</tool_call>'),
    (
        TAGS,
        "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>",
    ),
    (LAX, '<|tool_call>call:f{a:<|"|>x\ny<|"|>}<tool_call|>'),
    (EACH, '[CALLS][{"tool": "f", "args": {"a": "x\\ny"}}]'),
    (ONE, '<call>{"tool": "f", "args": {"a": "x\\ny"}}</call>'),
]


def stated(calls: dict[str, Any]) -> dict[str, Any]:
    fields = {"reasoning_content": THOUGHTS, "tool_calls": calls, "content": {"content": "text"}}
    return {"start_anchor": "<|im_start|>assistant\n", "fields": fields}


@pytest.mark.parametrize(("calls", "text"), EXAMPLES)
def test_a_stated_format_is_read(calls: dict[str, Any], text: str) -> None:
    found = find_format(load_registry(), {}, response_template=stated(calls))
    assert found.tools_from == found.reasoning_from == "the checkpoint's response_template"
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    reader, answer = AnswerReader(found.format, ReadOptions({"f": schema})), ReadAnswer()
    for char in "<think>hm</think>Hi" + text:
        answer.add(reader.push(char))
    answer.add(reader.finish())
    assert (answer.reasoning, answer.content) == ("hm", "Hi")
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": "x\ny"})


@pytest.mark.parametrize(
    "template",
    [
        None,
        [],
        {"version": 2},
        {"fields": []},
        stated(WHOLE | {"content": "kv-lines"}),
        stated(WHOLE | {"transform": None}),
        stated(TAGS | {"open_pattern": r"(a|b)(?P<name>\w+)"}),
        stated(TAGS | {"content_args": {"tag_pattern": r"(?P<value>.*?)=(?P<key>\w+)"}}),
        stated(LAX | {"content_args": {"string_delims": [["<", ">"]]}}),
        stated(LAX | {"open_pattern": 7}),
    ],
)
def test_what_is_not_understood_is_passed_over(template: Any) -> None:
    with pytest.raises(NotDerivedError):
        stated_format(template)
    assert (
        "response_template"
        not in find_format(load_registry(), {}, response_template=template).tools_from
    )
