"""Chat messages as templates expect them.

Everything that a template sees is plain JSON data, copied: a template cannot reach an object of
ours, and what it is given is not changed for the caller.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.records import Record

from vllmx_engine.text.prompt_text import Spellings

MAX_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's; a template may know others."""
_TRUSTED_ROLES = ("system", "developer", "assistant")
IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are images, in the names of several APIs."""
AUDIO_PARTS = ("audio", "input_audio", "audio_url")
"""Types of parts that are audio; templates read one of them."""
VIDEO_PARTS = ("video_url", "input_video", "video")
"""Types of parts that are videos."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts with a text; the others are what Responses calls them."""
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts of an assistant's turn that hold its thoughts, as several providers write them."""
_CALL_PARTS = ("tool_use", "tool-call", "server_tool_use")
"""Types of parts that repeat the calls of `tool_calls`."""
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class TemplateReads(Record):
    """The forms of messages that a template takes."""

    takes_parts: bool = False
    """It loops over a message's content, or over a variable set to it."""
    takes_text: bool = True
    """It takes content that is a string."""
    takes_none: bool = False
    """It tests whether content is none."""
    strings: frozenset[str] = frozenset(ROLES)
    """All string literals, including roles."""
    variables: frozenset[str] = frozenset()
    """The variables that it expects from outside."""

    def written(self, part: Any) -> Any:
        """A part of a content, with the type by which the template knows audio."""
        if not isinstance(part, dict) or part.get("type") != "audio":
            return part
        return {"type": next((one for one in AUDIO_PARTS if one in self.strings), "audio")}


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
    reads: TemplateReads,
    spellings: Spellings | None = None,
    *,
    text_arguments: bool = False,
) -> list[Message]:
    """Copy messages into the shape that this template reads, and check them: whatever asks for an
    answer to a conversation, over HTTP or not, comes through here.

    * `tool_calls[].function.arguments` as JSON text becomes the object, or with `text_arguments`
      an object becomes JSON text;
    * no calls (`tool_calls` null or empty) are left out;
    * `content` as a list of text parts becomes one text (parts joined by newlines) where the
      template does not read parts, and a text one part where it reads nothing else; where it reads
      both, a single text part and all that a system message says become text, because many
      templates read parts in some turns alone;
    * an assistant without content, which only calls tools, has None where the template asks for it,
      else an empty text: some templates would print "None";
    * an assistant's turn is read as several providers write it: see `read_history`;
    * reasoning is given under all names that templates use: `reasoning_content`, `thinking` and
      `reasoning`;
    * the role `developer` is `system` where the template does not name it.

    Args:
        spellings: special tokens that are marked as text, but in what operators (`system`,
            `developer`) and the model (`assistant`) say; None: none are.

    Raises:
        InvalidRequestError: no messages, one that is not an object with a role, a role that is
            neither one of `ROLES` nor named by the template, a user's turn without content, content
            that is neither text nor parts of served types, or calls that name no function.
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
        _check_role(plain, index, reads.strings)
        read_history(plain, index)
        _check_texts(plain, index)
        check_content(plain.get("content"), index)
        _check_calls(plain, index)
        for call in _tool_calls(plain):
            _convert_arguments(call["function"], as_text=text_arguments)
        _name_reasoning(plain)
        if spellings is not None and message["role"] not in _TRUSTED_ROLES:
            plain = {"role": plain.pop("role"), **spellings.guarded(plain)}
        content = plain.get("content")
        if content in (None, []):
            is_none = reads.takes_none and plain["role"] == "assistant"
            plain["content"] = None if is_none else ""
        elif isinstance(content, list) and (
            not reads.takes_parts or (reads.takes_text and _is_one_text(plain["role"], content))
        ):
            plain["content"] = _joined_text(content, index)
        elif isinstance(content, list):
            content = [reads.written(part) for part in content]
            plain["content"] = _as_parts(content, is_result=plain["role"] in ("tool", "function"))
        elif isinstance(content, str) and reads.takes_parts and not reads.takes_text:
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
    found = []
    for message in messages:
        copy = dict(message)
        if copy["content"] is None:
            copy["content"] = ""
        if calls := _tool_calls(message):
            copy["tool_calls"] = [{**call, "function": dict(call["function"])} for call in calls]
        for call in _tool_calls(copy):
            _convert_arguments(call["function"], as_text=True)
        found.append(copy)
    return found if found != messages else None


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _convert_arguments(function: dict[str, Any], *, as_text: bool) -> None:
    """Converts a call's arguments. Text that is not a JSON object, such as a model's broken call,
    is left as it is."""
    given = function.get("arguments")
    if as_text:
        text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        function["arguments"] = text or "{}"
        return
    if isinstance(given, dict):
        return
    try:
        arguments = json.loads(given or "{}") if (given or "{}").strip() else {}
    except (ValueError, RecursionError):
        return
    if arguments is None or isinstance(arguments, dict):
        function["arguments"] = plain_data(arguments or {}, "messages")


def _name_reasoning(message: Message) -> None:
    given = [message[name] for name in _REASONING_NAMES if message.get(name) is not None]
    if given:
        message["reasoning_content"] = given[0]
        message.setdefault("thinking", given[0])
        message.setdefault("reasoning", given[0])


def read_history(message: Message, index: int) -> None:
    """Brings a turn into the fields that templates read, wherever a provider wrote its thoughts,
    its refusal, the transcript of its speech or the older form of its one call.

    Raises:
        InvalidRequestError: speech without a transcript, or an older call that is none: they would
            be left out of the prompt.
    """
    content = message.get("content")
    is_assistant = message["role"] == "assistant"
    if is_assistant:
        _take_thoughts(message)
    if isinstance(content, list):
        said_elsewhere: tuple[str, ...] = _THOUGHT_PARTS if is_assistant else ()
        if message.get("tool_calls"):
            said_elsewhere += _CALL_PARTS
        parts = [
            _read_part(part, is_assistant=is_assistant)
            for part in content
            if not (isinstance(part, dict) and part.get("type") in said_elsewhere)
        ]
        content = message["content"] = parts if parts or not is_assistant else None
    refusal, audio = message.pop("refusal", None), message.pop("audio", None)
    transcript = audio.get("transcript") if is_assistant and isinstance(audio, dict) else None
    if audio and not isinstance(transcript, str):
        raise _unserved(f"messages[{index}].audio", "send its transcript")
    if content is None and is_assistant:
        said = refusal if isinstance(refusal, str) else transcript
        message["content"] = said or None
    older = message.pop("function_call", None)
    if older and not message.get("tool_calls"):
        if not isinstance(older, dict) or not isinstance(older.get("name"), str):
            raise _unserved(f"messages[{index}].function_call", "use tool_calls")
        message["tool_calls"] = [{"type": "function", "function": older}]


def _take_thoughts(message: Message) -> None:
    """Sets `reasoning_content` to the first thoughts that are not empty."""
    content, blocks = message.get("content"), message.pop("thinking_blocks", None)
    parts = content if isinstance(content, list) else ()
    of_parts = "".join(
        _plain_text(part.get("text") or part.get("thinking"))
        for part in parts
        if isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS
    )
    of_blocks = "".join(
        _plain_text(block.get("thinking"))
        for block in (blocks if isinstance(blocks, list) else ())
        if isinstance(block, dict)
    )
    if not isinstance(message.get("reasoning"), str):
        message.pop("reasoning", None)  # some providers have an object of that name
    for text in (message.get("reasoning_content"), message.get("reasoning"), of_parts, of_blocks):
        if text:
            message["reasoning_content"] = text
            return


def _read_part(part: Any, *, is_assistant: bool) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal" and is_assistant:
        return {"type": "text", "text": part.get("refusal")}
    if part.get("type") in _TEXT_PARTS:
        return {**part, "type": "text"}
    return part


def _plain_text(value: Any) -> str:
    """The text of a value that is a text, or a list of parts with texts."""
    if isinstance(value, list):
        return "".join(_plain_text(each.get("text")) for each in value if isinstance(each, dict))
    return value if isinstance(value, str) else ""


def _unserved(param: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is not served and would be left out: {remedy}", param=param
    )


def _check_texts(message: Message, index: int) -> None:
    for name in _TEXT_FIELDS:
        if message.get(name) is None:
            message.pop(name, None)
        elif not isinstance(message[name], str):
            param = f"messages[{index}].{name}"
            raise InvalidRequestError(
                f"{param} is {shown(message[name])}: it is a text, or null", param=param
            )


def check_content(content: Any, index: int) -> None:
    """Raises InvalidRequestError for what is neither text nor parts of types that are served."""
    param = f"messages[{index}].content"
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{param} is {shown(content)}: it is a text, or a list of parts", param=param
        )
    for part in content:
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind == "text":
            raise InvalidRequestError(
                f"messages[{index}] has a content part of type 'text' without its text", param=param
            )
        if kind not in (*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS):
            raise InvalidRequestError(
                f"messages[{index}] has a content part of type {shown(kind)}; this server takes"
                " text, image_url, video_url, input_audio and audio_url: send its text, or leave"
                " it out",
                param=param,
            )


def _check_calls(message: Message, index: int) -> None:
    """Removes an empty list of calls. Raises InvalidRequestError for a malformed call."""
    param = f"messages[{index}].tool_calls"
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{param} must be a list of calls", param=param)
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'{param}[{number}] must be {{"type": "function", "function": {{"name": ...,'
                ' "arguments": ...}}',
                param=f"{param}[{number}]",
            )
        if call.get("type") is None:
            call["type"] = "function"
        if call.get("id", "") is None:
            del call["id"]
        if not isinstance(function.get("arguments"), (str, dict, type(None))):
            raise InvalidRequestError(
                f"{param}[{number}].function.arguments must be JSON text or an object",
                param=f"{param}[{number}].function.arguments",
            )


def _as_parts(content: list[Any], *, is_result: bool) -> list[dict[str, Any]]:
    """The parts of a content. Texts of a tool's result become one: some templates write the first
    part alone."""
    parts = [_as_part(part) for part in content]
    if not is_result or any(part["type"] != "text" for part in parts):
        return parts
    return [{"type": "text", "text": "\n".join(part["text"] for part in parts)}]


def _as_part(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else part


def _is_one_text(role: str, parts: list[Any]) -> bool:
    """True if one text can replace parts: templates differ in how they join several, which matters
    least in a system message."""
    is_text = all(
        isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))
        for part in parts
    )
    return is_text and (role in ("system", "developer") or len(parts) == 1)


def _joined_text(parts: list[Any], index: int) -> str:
    """The text of checked parts. Raises InvalidRequestError where one is an image."""
    texts = []
    for part in map(_as_part, parts):
        if part["type"] != "text":
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {part['type']!r}; "
                "this model's chat template reads text alone",
                param=f"messages[{index}].content",
            )
        texts.append(part["text"])
    return "\n".join(texts)
