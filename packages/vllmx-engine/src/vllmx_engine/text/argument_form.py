"""How a chat template takes the arguments of past calls: as an object, or as JSON text.

A trial rendering shows which. Most take objects, but some concatenate the arguments with text: that
fails, prints Python's form, or (after the filter `safe`) escapes the whole call for HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vllmx_core.errors import TemplateError

_KEY, _VALUE = "zqkey", 'zq<"value'
_ARGUMENTS: dict[str, Any] = {_KEY: _VALUE, "zqother": [True, None]}
_ESCAPES = ("&#34;", "&quot;", "&#39;", "&lt;")
_ID = "zqcall001"
"""Some templates insist on nine letters and digits."""
_NAME = "zqname"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    _KEY: {"type": "string", "description": "d"},
                    "zqother": {"type": "array", "items": {}, "description": "d"},
                },
                "required": [],
            },
        },
    }
]

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""Renders messages with tools. Raises TemplateError."""


def takes_text_arguments(render: Render) -> bool:
    """Whether a template writes calls correctly only if their arguments are JSON text. Renders a
    call in one form or both."""
    as_object = _rendered(render, _ARGUMENTS)
    if as_object is not None and not _is_spoilt(as_object):
        return False
    as_text = _rendered(render, json.dumps(_ARGUMENTS))
    return as_text is not None and _holds_json(as_text) and not _is_spoilt(as_text)


def _rendered(render: Render, arguments: Any) -> str | None:
    """The conversation with one call; None where the template fails or leaves the call out."""
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "zquser"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "zqresult"},
    ]
    try:
        text = render(messages, _TOOLS)
    except TemplateError:
        return None
    called = text.rpartition("zquser")[2]
    return called if _KEY in called else None


def _is_spoilt(called: str) -> bool:
    """Whether a call has HTML's escapes, or Python's form of the object."""
    return any(escape in called for escape in _ESCAPES) or str(_ARGUMENTS) in called


def _holds_json(called: str) -> bool:
    """Whether the arguments are there as a JSON object."""
    decoder, at = json.JSONDecoder(), called.find('{"' + _KEY)
    while at >= 0:
        try:
            if decoder.raw_decode(called, at)[0] == _ARGUMENTS:
                return True
        except ValueError:
            pass
        at = called.find('{"' + _KEY, at + 1)
    return False
