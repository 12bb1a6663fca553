"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat_options import RESERVED_VARIABLES, ChatOptions

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


_TEXTS = ("text", "output_text")
"""Types of parts with a text; the second is what an answer's parts are called in Responses."""
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts of an assistant's turn that hold its thoughts, as several providers write them."""


class ImageURL(msgspec.Struct):
    url: str
    """`detail` is ignored: the model's own processor decides how much of an image it sees."""


class ContentPart(msgspec.Struct):
    """One piece of a message; the types "text" and "image_url" are served, and of an assistant what
    providers answer. Other keys are ignored."""

    type: str
    text: str | None = None
    image_url: ImageURL | str | None = None
    refusal: str | None = None
    thinking: Any = None


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
    """One turn. Templates see the fields that were given; other keys are ignored, which clients
    send back as a provider gave them."""

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Another name of `reasoning_content`, where it is a text."""
    thinking_blocks: Any = None
    """The thoughts of an answer of Anthropic's models behind a proxy."""
    refusal: Any = None
    """What an assistant said in place of its content."""
    audio: Any = None
    """An assistant's speech, of which the transcript is read."""
    function_call: Any = None
    """The older form of one call."""

    def check(self, index: int) -> None:
        """Raises InvalidRequestError for a part of the turn that no template would show."""
        if self.audio and _transcript(self.audio) is None:
            raise _unserved(f"messages[{index}].audio", "send its transcript")
        if self.function_call and not self.tool_calls and self._older_call() is None:
            raise _unserved(f"messages[{index}].function_call", "use tool_calls")

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as the chat template takes it. Raises InvalidRequestError."""
        message: dict[str, Any] = {"role": self.role, "content": self._content(index)}
        older = self._older_call()
        if calls := self.tool_calls or ([] if older is None else [older]):
            message["tool_calls"] = [
                {
                    "type": call.type or "function",
                    **({"id": call.id} if call.id is not None else {}),
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.written(),
                    },
                }
                for call in calls
            ]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        reasoning = self._reasoning()
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message

    def _older_call(self) -> ToolCall | None:
        """The call of `function_call`."""
        try:
            return ToolCall(msgspec.convert(self.function_call, ToolFunction))
        except msgspec.ValidationError:
            return None

    def _reasoning(self) -> str | None:
        """The thoughts of the turn, wherever a provider wrote them."""
        parts = self.content if isinstance(self.content, list) else ()
        of_parts = (_thought(part) for part in parts if isinstance(part, ContentPart))
        blocks = self.thinking_blocks if isinstance(self.thinking_blocks, list) else ()
        of_blocks = (_plain_text(each.get("thinking")) for each in blocks if isinstance(each, dict))
        for text in (
            self.reasoning_content,
            self.reasoning,
            "".join(of_parts),
            "".join(of_blocks),
        ):
            if text and isinstance(text, str):
                return text
        return self.reasoning_content

    def _content(self, index: int) -> str | list[dict[str, Any]] | None:
        is_assistant = self.role == "assistant"
        if self.content is None and is_assistant:
            said = self.refusal if isinstance(self.refusal, str) else _transcript(self.audio)
            return said or None
        if not isinstance(self.content, list):
            return self.content
        parts: list[dict[str, Any]] = []
        for part in self.content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            elif not (is_assistant and part.type in _THOUGHTS):
                parts.append(self._part(part, index))
        return parts if parts or not is_assistant else None

    def _part(self, part: ContentPart, index: int) -> dict[str, Any]:
        kind, param = part.type, f"messages[{index}].content"
        if kind == "image_url" and part.image_url is not None:
            image = part.image_url
            url = image if isinstance(image, str) else image.url
            return {"type": "image_url", "image_url": {"url": url}}
        is_refusal = kind == "refusal" and self.role == "assistant"
        if kind not in (*_TEXTS, "image_url") and not is_refusal:
            raise InvalidRequestError(
                f"messages[{index}] has a content part of type {kind!r}; this server takes text and"
                " image_url",
                param=param,
            )
        text = part.refusal if is_refusal else part.text
        if text is None or kind == "image_url":
            lacks = "its text" if kind in _TEXTS else "it"
            raise InvalidRequestError(
                f"messages[{index}] has a content part of type {kind!r} without {lacks}",
                param=param,
            )
        return {"type": "text", "text": text}


def _unserved(param: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is not served and would be left out: {remedy}", param=param
    )


def _transcript(audio: Any) -> str | None:
    text = audio.get("transcript") if isinstance(audio, dict) else None
    return text if isinstance(text, str) else None


def _thought(part: ContentPart) -> str:
    """The thoughts of a part, empty where it holds none."""
    if part.type not in _THOUGHTS:
        return ""
    return part.text or _plain_text(part.thinking)


def _plain_text(value: Any) -> str:
    """The text of a value that is a text, or a list of parts with texts."""
    if isinstance(value, list):
        return "".join(_plain_text(each.get("text")) for each in value if isinstance(each, dict))
    return value if isinstance(value, str) else ""


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


def template_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """The template's own switches. Raises InvalidRequestError for what has a field of its own."""
    for name in given or {}:
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {name!r}: use the field of that name",
                param="chat_template_kwargs",
            )
    return dict(given or {})


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
        self.check_named(bool(self.logprobs))
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
        arguments = template_arguments(self.chat_template_kwargs)
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
