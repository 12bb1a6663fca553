"""Chat messages as templates expect them.

Everything that a template sees is plain JSON data, copied: a template cannot reach an object of
ours, and what it is given is not changed for the caller.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

MAX_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's; a template may know others."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


def plain_data(value: Any, param: str, level: int = 0) -> Any:
    """A copy made of dict, list, str, int, float, bool and None alone.

    Raises:
        InvalidRequestError: anything else, keys that are not strings, or nesting beyond 64.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if level >= MAX_DEPTH:
        raise InvalidRequestError(f"{param} is nested more than {MAX_DEPTH} deep", param=param)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{param} has a key that is not a string", param=param)
        return {str(key): plain_data(item, param, level + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain_data(item, param, level + 1) for item in value]
    raise InvalidRequestError(
        f"{param} holds a {type(value).__name__}; only JSON values are allowed", param=param
    )


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    takes_parts: bool = False,
    takes_text: bool = True,
    takes_none: bool = False,
    strings: Collection[str] = ROLES,
) -> list[Message]:
    """Copy messages into the shape that this template reads.

    * `tool_calls[].function.arguments` as JSON text becomes the object;
    * `content` as a list of text parts becomes one text (parts joined by newlines) where the
      template does not read parts, and a text one part where it reads nothing else;
    * no content (an assistant that only calls tools) is None where the template asks for that,
      else an empty text: some templates would print "None";
    * reasoning is given under all names that templates use: `reasoning_content`, `thinking` and
      `reasoning`;
    * the role `developer` is `system` where the template does not name it.

    Args:
        strings: what the template names in quotes, roles among them.

    Raises:
        InvalidRequestError: no messages, one that is not an object with a role, a role that is
            neither one of `ROLES` nor named by the template, or a user's turn without content.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one", param="messages")
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] must be an object with a role", param="messages"
            )
        plain: Message = plain_data(message, "messages")
        _check_role(plain, index, strings)
        _parse_arguments(plain)
        _name_reasoning(plain)
        content = plain.get("content")
        if content is None:
            plain["content"] = None if takes_none else ""
        elif isinstance(content, list) and not takes_parts:
            plain["content"] = _joined_text(content, index)
        elif isinstance(content, str) and takes_parts and not takes_text:
            plain["content"] = [{"type": "text", "text": content}]
        result.append(plain)
    return result


def _check_role(message: Message, index: int, strings: Collection[str]) -> None:
    role = message["role"]
    if role not in ROLES and role not in strings:
        raise InvalidRequestError(
            f"messages[{index}].role is {shown(role)}, which neither the API nor this model's chat"
            f" template knows: use one of {', '.join(ROLES)}",
            param=f"messages[{index}].role",
        )
    if role == "developer" and role not in strings:
        message["role"] = "system"  # OpenAI's newer name of it
    if role == "user" and message.get("content") in (None, []):
        raise InvalidRequestError(
            f"messages[{index}] is a user's turn without content: give it a text, or leave it out",
            param=f"messages[{index}].content",
        )


def without_rich_values(messages: list[Message]) -> list[Message] | None:
    """Prepares messages for templates that only add strings: None content as "", arguments as JSON
    text.

    None where that changes nothing.
    """
    changed = False
    result = []
    for message in messages:
        copy = dict(message)
        if copy["content"] is None:
            copy["content"] = ""
            changed = True
        calls = []
        for call in _tool_calls(message):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), (dict, list)):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                call = {**call, "function": {**function, "arguments": text}}
                changed = True
            calls.append(call)
        if calls:
            copy["tool_calls"] = calls
        result.append(copy)
    return result if changed else None


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [call for call in calls if isinstance(call, dict)]


def _parse_arguments(message: Message) -> None:
    """Text that is no JSON object (a model's broken call, say) is left as it is."""
    for call in _tool_calls(message):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            function["arguments"] = plain_data(arguments, "messages")


def _name_reasoning(message: Message) -> None:
    given = [message[name] for name in _REASONING_NAMES if message.get(name) is not None]
    if given:
        message["reasoning_content"] = given[0]
        message.setdefault("thinking", given[0])
        message.setdefault("reasoning", given[0])


def _joined_text(parts: list[Any], index: int) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {kind!r}; "
                "this model's chat template reads text alone",
                param="messages",
            )
    return "\n".join(texts)
