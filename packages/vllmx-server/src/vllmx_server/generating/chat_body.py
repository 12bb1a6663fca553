"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.text.messages import check_content, read_history

from vllmx_server.generating.fields import field_error
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.generating.tools import (
    MAX_TOOLS,
    allowed_tools,
    check_tools,
    forced_tool,
    tool_list,
)
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form

MAX_MESSAGES = 4096
MAX_TEMPLATE = 64 << 10
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The amount of thinking; "none" turns it off."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The names of the template's switches for thinking."""
_OPTIONAL = (
    "name", "tool_call_id", "reasoning_content", "reasoning", "thinking_blocks", "refusal", "audio",
    "function_call",
)  # fmt: skip


class ImageURL(msgspec.Struct):
    url: str
    """`detail` is ignored: the model's own processor decides how much of an image it sees."""


class InputAudio(msgspec.Struct):
    data: str
    """The file in base64."""
    format: str = "wav"


class PredictedPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct):
    """A text that the answer may repeat in parts, such as a file to be edited: the engine drafts
    from it, which saves time and changes no token."""

    content: str | list[PredictedPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ContentPart(msgspec.Struct):
    """One piece of a message: types "text", "image_url", "video_url", "input_audio" and
    "audio_url", and those of providers' answers in an assistant's turn. Other keys are ignored."""

    type: str
    text: str | None = None
    image_url: ImageURL | str | None = None
    video_url: ImageURL | str | None = None
    input_audio: InputAudio | None = None
    audio_url: ImageURL | str | None = None
    refusal: str | None = None
    thinking: Any = None

    def for_template(self, index: int) -> dict[str, Any]:
        """The part of message `index`. Raises InvalidRequestError."""
        part = {
            name: value
            for name in ("type", "text", "refusal", "thinking")
            if (value := getattr(self, name)) is not None
        }
        if self.type in ("image_url", "video_url", "input_audio", "audio_url"):
            found = getattr(self, self.type)
            if found is None:
                raise InvalidRequestError(
                    f"messages[{index}] has a content part of type {self.type!r} without it",
                    param=f"messages[{index}].content",
                )
            part[self.type] = (
                {"url": found} if isinstance(found, str) else msgspec.to_builtins(found)
            )
        return part


class ToolFunction(msgspec.Struct, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] | None = ""

    def written(self) -> str | dict[str, Any]:
        """The arguments as the client wrote them."""
        return "" if self.arguments is None else self.arguments


class ToolCall(msgspec.Struct):
    """A call; other keys are ignored."""

    function: ToolFunction
    id: str | None = None
    type: str | None = "function"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn. Templates see the fields that were given. Other keys are ignored: clients send back
    what a provider gave them."""

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Another name of `reasoning_content`, where it is a text."""
    thinking_blocks: Any = None
    """Thoughts of Anthropic's models behind a proxy."""
    refusal: Any = None
    """An assistant's refusal, which replaces its content."""
    audio: Any = None
    """An assistant's speech; its transcript is read."""
    function_call: Any = None
    """The older form of one call."""

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as the chat template takes it. Raises InvalidRequestError."""
        message: dict[str, Any] = {"role": self.role, "content": self._content(index)}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": call.type or "function",
                    **({"id": call.id} if call.id is not None else {}),
                    "function": {"name": call.function.name, "arguments": call.function.written()},
                }
                for call in self.tool_calls
            ]
        for name in _OPTIONAL:
            if (value := getattr(self, name)) is not None:
                message[name] = value
        read_history(message, index)
        check_content(message["content"], index)
        return message

    def _content(self, index: int) -> str | list[Any] | None:
        if not isinstance(self.content, list):
            return self.content
        return [
            {"type": "text", "text": part} if isinstance(part, str) else part.for_template(index)
            for part in self.content
        ]


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises InvalidRequestError for none, for more than `MAX_MESSAGES`, and for one that is not
    served."""
    if not messages:
        raise field_error("messages", "is empty: give at least one")
    if len(messages) > MAX_MESSAGES:
        raise field_error(
            "messages", f"has {len(messages)} entries, at most {MAX_MESSAGES} are taken"
        )


def generation_prompt(add: bool | None, continue_final_message: bool | None) -> bool:
    """True if the prompt ends with the beginning of an answer. Raises InvalidRequestError."""
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
    prediction: Prediction | None = None

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
    def predicted_text(self) -> str:
        return "" if self.prediction is None else self.prediction.text

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
        self.check_named(bool(self.logprobs))
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:  # vLLM's clients send the default, 0
            raise field_error("top_logprobs", "needs logprobs = true")
        if self.echo and not self.continue_final_message:
            raise field_error(
                "echo", "repeats the final message and so needs continue_final_message = true"
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
        """The options for rendering the conversation. Raises InvalidRequestError."""
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
