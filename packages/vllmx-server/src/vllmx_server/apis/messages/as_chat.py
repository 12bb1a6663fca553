"""Anthropic's requests as chat completions, so that both are answered by the same code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.apis.messages.schema import Block, CountTokensRequest, MessagesRequest, Turn
from vllmx_server.generating.chat_body import (
    THINKING_SWITCHES,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    ImageURL,
    ToolCall,
    ToolFunction,
)
from vllmx_server.generating.fields import (
    GENERATING,
    JSONSchemaFormat,
    ResponseFormat,
    field_error,
    needed,
)


def chat_of(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat completion that a Messages request asks for. Raises InvalidRequestError."""
    turns, tools = list(_turns(body)), _tools(body)
    if not turns:
        raise field_error("messages", "hold no text: give at least one")
    one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    # Thinking is off unless the request asks for it, as in Anthropic's API.
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    switches: dict[str, Any] = dict.fromkeys(THINKING_SWITCHES, thinks)
    chat = ChatCompletionRequest(
        messages=turns,
        tools=tools,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False if one_call else None,
        chat_template_kwargs=switches | (body.chat_template_kwargs or {}),
        continue_final_message=True if body.messages[-1].role == "assistant" else None,
    )
    _configure(chat, body)
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        if body.thinking is not None:
            chat.thinking_token_budget = body.thinking.budget_tokens
        for name in ("stream", *GENERATING):
            setattr(chat, name, getattr(body, name))
    return chat


def _configure(chat: ChatCompletionRequest, body: CountTokensRequest) -> None:
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        chat.reasoning_effort = "high" if effort in ("xhigh", "max") else effort
    if body.format is not None:
        schema = JSONSchemaFormat(schema=body.format.schema)
        chat.response_format = ResponseFormat("json_schema", schema)


def _tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({} if tool.description is None else {"description": tool.description}),
                "parameters": tool.input_schema,
                **({} if tool.strict is None else {"strict": tool.strict}),
            },
        }
        for tool in body.tools or ()
    ] or None


def _tool_choice(body: CountTokensRequest) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "tool_choice of type 'tool' needs the tool's name", param="tool_choice.name"
            )
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


# --- turns ----------------------------------------------------------------------------------------
def _turns(body: CountTokensRequest) -> Iterator[ChatMessage]:
    if body.system:
        yield ChatMessage("system", _joined(_text_of(body.system, "system")))
    names: dict[str, str] = {}
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if isinstance(turn.content, str):
            yield ChatMessage(turn.role, turn.content)
        elif turn.role == "assistant":
            yield _assistant(turn.content, where, names)
        else:
            yield from _given(turn, turn.content, where, names)


def _assistant(blocks: Sequence[Block], where: str, names: dict[str, str]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.type == "text":
            texts.append(needed(block.text, place, "text"))
        elif block.type == "thinking":
            thoughts.append(needed(block.thinking, place, "thinking"))
        elif block.type == "tool_use":
            name, call_id = needed(block.name, place, "name"), needed(block.id, place, "id")
            names[call_id] = name
            calls.append(ToolCall(ToolFunction(name, block.input or {}), id=call_id))
        elif block.type != "redacted_thinking":  # it holds nothing that can be read
            raise _unserved(block, place)
    return ChatMessage(
        "assistant",
        "".join(texts) if texts or not calls else None,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _given(
    turn: Turn, blocks: Sequence[Block], where: str, names: dict[str, str]
) -> Iterator[ChatMessage]:
    """A user's turn may mix what tools returned with text: each is a message of its own. Images
    that tools returned follow as the user's, for chat templates show them there alone."""
    parts: list[str | ContentPart] = []
    returned: list[str | ContentPart] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.type == "text":
            parts.append(ContentPart("text", needed(block.text, place, "text")))
        elif block.type == "image":
            parts.append(_image(block, place))
        elif block.type == "tool_result":
            if parts:
                yield ChatMessage(turn.role, parts)
                parts = []
            yield _result(block, place, names, returned)
        else:
            raise _unserved(block, place)
    if returned or parts:
        yield ChatMessage(turn.role, [*returned, *parts])


def _image(block: Block, where: str) -> ContentPart:
    source = block.source if isinstance(block.source, dict) else {}
    kind, media, data = source.get("type"), source.get("media_type"), source.get("data")
    if kind == "base64" and isinstance(media, str) and isinstance(data, str):
        return ContentPart("image_url", image_url=ImageURL(f"data:{media};base64,{data}"))
    if kind == "url" and isinstance(source.get("url"), str):
        return ContentPart("image_url", image_url=ImageURL(source["url"]))
    raise field_error(
        f"{where}.source", "must be of type base64, with media_type and data, or of type url"
    )


def _result(
    block: Block, where: str, names: dict[str, str], images: list[str | ContentPart]
) -> ChatMessage:
    """Adds the images of what a tool returned to `images`."""
    call_id = needed(block.tool_use_id, where, "tool_use_id")
    if call_id not in names:
        raise field_error(
            f"{where}.tool_use_id",
            f"is {shown(call_id)}, which is the id of no tool_use block before"
            " it: send the call, too",
        )
    content = block.content or ""
    if isinstance(content, list):
        for number, one in enumerate(content):
            if one.type == "image":
                images.append(_image(one, f"{where}.content[{number}]"))
        content = [one for one in content if one.type != "image"]
    text = _joined(_text_of(content, where))
    if block.is_error:
        text = f"Error: {text}"
    return ChatMessage("tool", text, name=names[call_id], tool_call_id=call_id)


def _text_of(content: str | list[Block], where: str) -> str | list[str | ContentPart]:
    if isinstance(content, str):
        return content
    parts: list[str | ContentPart] = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if block.type != "text":
            raise _unserved(block, place)
        parts.append(ContentPart("text", needed(block.text, place, "text")))
    return parts


def _joined(content: str | list[str | ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.text or "" for part in content)


def _unserved(block: Block, where: str) -> InvalidRequestError:
    return field_error(
        where,
        f"has the type {shown(block.type)}, which is not served here: this server takes"
        " text, image, thinking, tool_use and tool_result, each in its place",
    )
