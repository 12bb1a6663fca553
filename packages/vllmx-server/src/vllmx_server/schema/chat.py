"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.chat import ChatOptions

from vllmx_server.schema.decode import check_free_form
from vllmx_server.schema.sampling import SamplingFields

MAX_MESSAGES = 4096


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One piece of a message; only type "text" is served."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: ToolFunction
    id: str | None = None
    type: str = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One turn. Templates see exactly the fields that were given."""

    role: str
    content: str | list[str | TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Accepted and ignored: clients send their own answers back with these.
    audio: Any = None
    annotations: Any = None
    function_call: Any = None

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as the chat template takes it. Raises InvalidRequestError."""
        message: dict[str, Any] = {"role": self.role, "content": self._content(index)}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": call.type,
                    **({"id": call.id} if call.id is not None else {}),
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in self.tool_calls
            ]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message

    def _content(self, index: int) -> str | list[dict[str, Any]] | None:
        if not isinstance(self.content, list):
            return self.content
        parts: list[dict[str, Any]] = []
        for part in self.content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            elif part.type == "text" and part.text is not None:
                parts.append({"type": "text", "text": part.text})
            elif part.type == "text":
                raise InvalidRequestError(
                    f"messages[{index}] has a content part of type 'text' without its text",
                    param=f"messages[{index}].content",
                )
            else:
                raise InvalidRequestError(
                    f"messages[{index}] has a content part of type {part.type!r}; this server"
                    " takes text alone",
                    param=f"messages[{index}].content",
                )
        return parts


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionSpec
    type: str = "function"


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "text"
    json_schema: Any = None


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises InvalidRequestError for none, and for more than `MAX_MESSAGES`."""
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are taken",
            param="messages",
        )


RESERVED_ARGUMENTS = (
    "messages", "tools", "documents", "template", "add_generation_prompt", "continue_final_message"
)  # fmt: skip


def template_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """The template's own switches. Raises InvalidRequestError for what has a field of its own."""
    for name in given or {}:
        if name in RESERVED_ARGUMENTS:
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {name!r}: use the field of that name",
                param="chat_template_kwargs",
            )
    return dict(given or {})


def tool_list(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as the template takes them."""
    return msgspec.to_builtins(tools) if tools else None


_UNBUILT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), 'answers are text: use ["text"] or leave it out'),
    "audio": ((), "answers are text: leave it out"),
    "verbosity": (("medium",), 'say in the prompt how long the answer may be; use "medium"'),
    "web_search_options": ((), "nothing is searched: leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "its functions are not served: leave it out"),
}
"""Of fields that name what is not built: the values that change nothing, and what to do instead."""


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's chat completion with vLLM's extensions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None

    # Taken where they ask for what is done anyway: `_UNBUILT` says which values those are.
    modalities: list[str] | None = None
    audio: Any = None
    verbosity: str | None = None
    web_search_options: Any = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    prediction: Any = None  # would save time and change no token

    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        SamplingFields.check(self)
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:  # vLLM's clients send the default, 0
            raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
        self._check_tool_choice()
        for name, (harmless, remedy) in _UNBUILT.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"{name} = {value!r} is not served: {remedy}", param=name)
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequestError(
                f"response_format type {self.response_format.type!r} is not served: use"
                ' {"type": "text"} or leave it out',
                param="response_format",
            )
        if self.echo and not self.continue_final_message:
            raise InvalidRequestError(
                "echo repeats the final message and so needs continue_final_message = true",
                param="echo",
            )
        for name in ("tools", "chat_template_kwargs", "documents"):
            check_free_form(getattr(self, name), name)

    def _check_tool_choice(self) -> None:
        harmless = (None, "none") if self.tools else (None, "none", "auto")
        if self.tool_choice not in harmless:
            raise InvalidRequestError(
                f"tool_choice = {self.tool_choice!r} is not served: tools are shown to the model,"
                ' but its calls are returned as text; leave tool_choice out or set "none"',
                param="tool_choice",
            )

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as the template takes them."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def chat_options(self) -> ChatOptions:
        """How to render the conversation. Raises InvalidRequestError."""
        arguments = template_arguments(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatOptions(
            tools=tool_list(self.tools),
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            template_kwargs=arguments,
        )


DECODER = msgspec.json.Decoder(ChatCompletionRequest)
