"""Conversations in the forms that some chat templates insist on: each is tried only where a
template fails on the one before it, or prints Python where a text belongs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllmx_engine.text.call_ids import with_call_ids

Message = dict[str, Any]
_PRINTED_PART = re.compile(r"\{'(type': 'text|text': )'")
"""The beginning of a part as Python prints it."""


def history_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages as they are, then more and more as templates may want them. Forms that change
    nothing are left out."""
    yield messages
    for form in _FORMS:
        found = form(messages)
        if found is not None:
            messages = found
            yield messages


def with_one_system(messages: list[Message]) -> list[Message] | None:
    """One system message in place of several at the beginning. None where that changes nothing."""
    is_system = [each["role"] in ("system", "developer") for each in messages]
    size = is_system.index(False) if False in is_system else len(messages)
    texts = [text_of(each["content"]) for each in messages[:size]]
    if size < 2 or None in texts:
        return None
    joined = "\n\n".join(text for text in texts if text)
    return [{**messages[0], "content": joined}, *messages[size:]]


def with_lone_calls(messages: list[Message]) -> list[Message] | None:
    """Each call in a turn of its own, with its result behind it, for templates that take one call
    in a turn. None where that changes nothing."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            turn = {**message, "tool_calls": [call]}
            found.append(turn if number == 0 else {**turn, "content": ""})
            result = _result_of(call, results)
            if result is not None:
                results.remove(result)
                found.append(result)
        found += results
    return found if len(found) > len(messages) else None


def _result_of(call: Message, results: Sequence[Message]) -> Message | None:
    """The result with the id of a call, else the first that has none."""
    call_id = call.get("id")
    for wanted in (call_id, None):
        for result in results:
            if result.get("tool_call_id") == wanted:
                return result
    return None


def with_texts(messages: list[Message], prompt: str) -> list[Message] | None:
    """One text in place of the parts of a content that a template printed as Python does: some
    take parts from users alone. None where that changes nothing."""
    found = [
        {**each, "content": text} if (text := _printed_text(each, prompt)) is not None else each
        for each in messages
    ]
    return found if found != messages else None


def _printed_text(message: Message, prompt: str) -> str | None:
    content = message["content"]
    if not isinstance(content, list) or _PRINTED_PART.search(prompt) is None:
        return None
    return text_of(content)


def text_of(content: Any) -> str | None:
    """A text, or the text of parts; None where one is no text."""
    if not isinstance(content, list):
        return content or ""
    texts = [part.get("text") if part.get("type") == "text" else None for part in content]
    return "\n".join(text for text in texts if text) if None not in texts else None


_FORMS: tuple[Callable[[list[Message]], list[Message] | None], ...] = (
    with_call_ids,
    with_one_system,
    with_lone_calls,
)
