"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.text.messages import UNSERVED_FIELDS, check_content, check_unserved

from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form
from vllmx_server.schema.sampling import SamplingFields
from vllmx_server.schema.tools import MAX_TOOLS, allowed_tools, check_tools, forced_tool, tool_list

MAX_MESSAGES = 4096
MAX_TEMPLATE = 64 << 10
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much to think; "none" turns thinking off."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call whether the model thinks."""


class ImageURL(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    detail: str | None = None
    """Accepted and ignored: the model's own processor decides how much of an image it sees."""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One piece of a message; the types "text" and "image_url" are served."""

    type: str
    text: str | None = None
    image_url: ImageURL | str | None = None
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
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Accepted and ignored: clients send our answers back with these.
    refusal: str | None = None
    annotations: Any = None
    # Ours have none.
    audio: Any = None
    function_call: Any = None

    def check(self, index: int) -> None:
        """Raises InvalidRequestError for a part of the turn that no template would show."""
        check_unserved({name: getattr(self, name) for name in UNSERVED_FIELDS}, index)

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
            elif part.type == "text":
                parts.append({"type": "text", "text": part.text})
            elif part.type == "image_url" and part.image_url is not None:
                image = part.image_url
                url = image if isinstance(image, str) else image.url
                parts.append({"type": "image_url", "image_url": {"url": url}})
            elif part.type == "image_url":
                raise InvalidRequestError(
                    f"messages[{index}] has a content part of type 'image_url' without it",
                    param=f"messages[{index}].content",
                )
            else:
                parts.append({"type": part.type})
        check_content(parts, index)
        return parts


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises InvalidRequestError for none, for more than `MAX_MESSAGES`, and for one that is not
    served."""
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are taken",
            param="messages",
        )
    for index, message in enumerate(messages):
        message.check(index)


def generation_prompt(add: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the prompt ends with the beginning of an answer. Raises InvalidRequestError."""
    if add and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message goes on with the last message, and add_generation_prompt begins"
            " a new one: set one of them",
            param="add_generation_prompt",
        )
    return not continue_final_message if add is None else add


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's chat completion with vLLM's extensions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: limits.MaxTokens | None = None
    max_completion_tokens: limits.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: limits.Likeliest | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    """False: thoughts are separated from content and left out."""
    thinking_token_budget: limits.ThinkingBudget | None = None
    """The number of tokens of thoughts after which their end is forced; -1: never."""

    # Taken where they ask for what is done anyway: see `unserved`.
    modalities: list[str] | None = None
    audio: Any = None
    verbosity: str | None = None
    web_search_options: Any = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    media_io_kwargs: Any = None
    prediction: Any = None  # would save time and change no token

    echo: bool | None = None
    add_generation_prompt: bool | None = None
    """None: the prompt is added unless `continue_final_message` is true."""
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """None: false, for templates write their own."""
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE)] | None = None
    """Only where the operator trusts clients with it."""
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
        self.check_streamed("top_logprobs", self.num_logprobs)
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:  # vLLM's clients send the default, 0
            raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
        if self.echo and not self.continue_final_message:
            raise InvalidRequestError(
                "echo repeats the final message and so needs continue_final_message = true",
                param="echo",
            )
        check_tools(self.tools)
        forced_tool(self.tool_choice, self.tools)
        for name in ("chat_template_kwargs", "documents"):
            check_free_form(getattr(self, name), name)

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as the template takes them."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    def chat_options(self) -> ChatOptions:
        """How to render the conversation. Raises InvalidRequestError."""
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            thinks = dict.fromkeys(THINKING_SWITCHES, self.reasoning_effort != "none")
            arguments = {"reasoning_effort": self.reasoning_effort} | thinks | arguments
        return ChatOptions(
            tools=tool_list(self.callable_tools),
            documents=self.documents,
            add_generation_prompt=generation_prompt(
                self.add_generation_prompt, self.continue_final_message
            ),
            continue_final_message=bool(self.continue_final_message),
            one_call=self.parallel_tool_calls is False,
            tool_choice=forced_tool(self.tool_choice, self.tools) or "auto",
            allowed_tools=allowed_tools(self.tool_choice),
            source=self.chat_template,
            template_kwargs=arguments,
        )


DECODER = msgspec.json.Decoder(ChatCompletionRequest)
