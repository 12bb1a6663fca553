"""Requests and items of Responses as a chat completion, so that both are answered by the same
code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.apis.responses.items import summary_of, text_of_error
from vllmx_server.apis.responses.schema import InputItem, InputPart, ResponsesRequest, TextOptions
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.apis.responses.tools import choice_of, functions_of, whole_name
from vllmx_server.generating.chat_body import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Effort,
    ImageURL,
    ToolCall,
    ToolFunction,
)
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.fields import (
    GENERATING,
    JSONSchemaFormat,
    ResponseFormat,
    field_error,
    needed,
)
from vllmx_server.generating.reading import body_bytes
from vllmx_server.generating.served import Served
from vllmx_server.http.client import owner_of

_SAME = (
    "stream", "stop", "thinking_token_budget", "parallel_tool_calls", "chat_template_kwargs",
    *GENERATING,
)  # fmt: skip
"""Fields that mean the same in chats."""
_EFFORTS: dict[Effort, Effort] = {"xhigh": "high", "max": "high", "minimal": "low"}
_RETURNED = ("function_call_output", "custom_tool_call_output")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def items_of(body: ResponsesRequest) -> list[InputItem]:
    """The request's own input."""
    if isinstance(body.input, str):
        return [InputItem("message", role="user", content=body.input)] if body.input else []
    return body.input


def chat_of(
    body: ResponsesRequest,
    before: Sequence[InputItem],
    extend: Callable[[ChatCompletionRequest], None] | None = None,
) -> ChatCompletionRequest:
    """The chat completion that a request asks for, after the items that came `before` it. Raises
    InvalidRequestError.

    Args:
        extend: adds to it before it is checked.
    """
    messages = Messages()
    if body.instructions:
        messages.say("system", body.instructions)
    past = "conversation" if body.conversation is not None else "previous_response_id"
    for index, item in enumerate(before):
        messages.add(item, f"{past}, item {index}")
    for index, item in enumerate(items_of(body)):
        messages.add(item, f"input[{index}]")
    messages.end()
    chat = ChatCompletionRequest(messages=messages.found)
    for name in _SAME:
        setattr(chat, name, getattr(body, name))
    chat.max_tokens = body.max_output_tokens
    if body.has_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    chat.tools = functions_of(body.tools)
    chat.tool_choice = choice_of(body.tool_choice, body.tools)
    chat.response_format = _format(body.text)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat.reasoning_effort = _EFFORTS.get(body.reasoning.effort, body.reasoning.effort)
    if extend is not None:
        extend(chat)
    with RESPONSES_FIELDS.told():
        chat.check()
    return chat


def _format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else ResponseFormat(wanted.type)
    schema = JSONSchemaFormat(wanted.name, wanted.schema, wanted.description, wanted.strict)
    return ResponseFormat("json_schema", schema)


async def items_before(request: Request, served: Served, body: ResponsesRequest) -> list[InputItem]:
    """The conversation that came before; its bytes are counted as the body's."""
    kept, owner, most = served.store(KeptResponses), owner_of(request), served.config.max_body_bytes
    if body.conversation_id is not None:
        before, num_bytes = await kept.conversations.items(owner, body.conversation_id, most)
    elif body.previous_response_id is not None:
        before, num_bytes = await kept.responses.conversation(
            owner, body.previous_response_id, MAX_MESSAGES, most
        )
    else:
        return []
    request.scope["state"]["body_bytes"] = body_bytes(request) + num_bytes
    return before


def check_items(items: Sequence[InputItem], name: str) -> None:
    """Raises InvalidRequestError for an item that is not served. An output may come without its
    call."""
    messages = Messages(item.call_id for item in items if item.call_id is not None)
    for index, item in enumerate(items):
        messages.add(item, f"{name}[{index}]")


class Messages:
    """Chat messages out of items: thoughts, text and calls of one turn become one message.

    Args:
        known: the ids of calls that were made elsewhere.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.found: list[ChatMessage] = []
        self._turn: ChatMessage | None = None
        """The turn of the assistant, to which more may come."""
        self._called: dict[str, str] = dict.fromkeys(known, "")
        """The name of the function of each call."""
        self._returned_images: list[str | ContentPart] = []
        """Images that tools returned: they follow what else tools return, as the user's."""

    def say(self, role: str, content: str | list[str | ContentPart]) -> None:
        """A message of its own."""
        self._turn = None
        self.found.append(ChatMessage(role, content))

    def end(self) -> None:
        """Adds what is left."""
        if self._returned_images:
            self.say("user", self._returned_images)
            self._returned_images = []

    def add(self, item: InputItem, where: str) -> None:
        """Raises InvalidRequestError for an item that is not served."""
        kind = item.type or "message"
        if kind not in _RETURNED:
            self.end()
        if kind == "message" and item.role == "assistant":
            turn = self._assistant(lambda turn: not turn.content and not turn.tool_calls)
            turn.content = _text(item.content, where)
        elif kind == "message":
            self.say(needed(item.role, where, "role"), _parts(item.content, where))
        elif kind == "reasoning":
            thought = _text(item.content or item.summary or "", where)
            turn = self._assistant(lambda turn: not turn.content and not turn.tool_calls)
            turn.reasoning_content = (turn.reasoning_content or "") + thought or None
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where)
        elif kind in _RETURNED:
            self._returned(item, where)
        elif kind == "mcp_call":
            self._mcp_call(item, where)
        elif kind == "compaction":
            turn = self._assistant(lambda turn: not turn.content and not turn.tool_calls)
            turn.content = summary_of(item, where)
        elif kind == "mcp_list_tools":
            pass  # the request says which tools there are
        else:
            raise field_error(
                where,
                f"has the type {shown(kind)}, which is not served here: this server takes"
                " message, reasoning, function_call, custom_tool_call and what those return,"
                " mcp_call, mcp_list_tools and compaction",
            )

    def _call(self, item: InputItem, where: str) -> None:
        name, call_id = needed(item.name, where, "name"), needed(item.call_id, where, "call_id")
        arguments: str | dict[str, Any] = item.arguments or ""
        if item.type == "custom_tool_call":
            arguments = {"input": item.input or ""}
        function = ToolFunction(whole_name(name, item.namespace), arguments)
        turn = self._assistant(lambda turn: True)
        turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(function, id=call_id)]
        self._called[call_id] = function.name

    def _returned(self, item: InputItem, where: str) -> None:
        call_id = needed(item.call_id, where, "call_id")
        name = self._called.get(call_id)
        if name is None:
            kind = "function call" if item.type == "function_call_output" else "custom tool call"
            raise InvalidRequestError(
                f"No tool call found for {kind} output with call_id {shown(call_id)}: send the"
                " call before it, or previous_response_id",
                param=where,
            )
        self._turn = None
        parts = _parts(item.output, where, "output")
        if isinstance(parts, list):
            self._returned_images += (part for part in parts if not _is_text(part))
            parts = "".join(part.text or "" for part in parts if _is_text(part))
        self.found.append(ChatMessage("tool", parts, name=name, tool_call_id=call_id))

    def _mcp_call(self, item: InputItem, where: str) -> None:
        """The call and its result are two turns."""
        for field in ("id", "name", "server_label"):
            needed(getattr(item, field), where, field)
        name = f"{item.server_label}__{item.name}"
        turn = self._assistant(lambda turn: True)
        call = ToolCall(ToolFunction(name, item.arguments or ""), id=item.id)
        turn.tool_calls = [*(turn.tool_calls or ()), call]
        text = text_of_error(item.error) if item.output is None else _text(item.output, where)
        self._turn = None
        self.found.append(ChatMessage("tool", text, name=name, tool_call_id=item.id))

    def _assistant(self, takes: Any) -> ChatMessage:
        if self._turn is None or not takes(self._turn):
            self._turn = ChatMessage("assistant")
            self.found.append(self._turn)
        return self._turn


def _is_text(part: str | ContentPart) -> TypeGuard[ContentPart]:
    return isinstance(part, ContentPart) and part.type == "text"


def _parts(
    content: str | list[InputPart] | None, where: str, field: str = "content"
) -> str | list[str | ContentPart]:
    if isinstance(content, str):
        return content
    found: list[str | ContentPart] = []
    for number, part in enumerate(content or ()):
        place = f"{where}.{field}[{number}]"
        if part.type == "input_image":
            found.append(_image(part, place))
        else:
            found.append(ContentPart("text", _text_of(part, where, number)))
    if len(found) == 1 and isinstance(found[0], ContentPart) and found[0].text is not None:
        return found[0].text
    return found


def _image(part: InputPart, where: str) -> ContentPart:
    if part.file_id is not None or not isinstance(part.image_url, str):
        raise InvalidRequestError(
            f"{where} is an image without image_url: give a data URL; files are not taken as images"
            " here",
            param=f"{where}.image_url",
        )
    return ContentPart("image_url", image_url=ImageURL(part.image_url))


def _text(content: str | list[InputPart] | None, where: str) -> str:
    return content if isinstance(content, str) else "".join(_texts(content or (), where))


def _texts(parts: Iterable[InputPart], where: str) -> Iterable[str]:
    for number, part in enumerate(parts):
        yield _text_of(part, where, number)


def _text_of(part: InputPart, where: str, number: int) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXTS, "refusal"):
        raise InvalidRequestError(
            f"{where} has a part of type {shown(part.type)}; this server takes text, and images in"
            " messages of the user",
            param=f"{where}.content[{number}]",
        )
    return needed(text, f"{where}.content[{number}]", "text")
