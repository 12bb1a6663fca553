"""Bodies of /v1/responses and /v1/conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.generating.chat_body import MAX_MESSAGES, Effort
from vllmx_server.generating.fields import GeneratingFields, field_error
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form
from vllmx_server.schema.intervals import Metadata

MAX_TOOLS = 1024


class InputPart(msgspec.Struct):
    """One piece of a message, of a thought or of what a tool returned. Other keys are ignored."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: Any = None
    """An image that was uploaded, which is not served."""
    annotations: Any = None
    logprobs: Any = None
    """Both are kept with the item, and ignored."""


class InputItem(msgspec.Struct, omit_defaults=True):
    """One item of a conversation; which fields belong to it says its type. Other keys are
    ignored."""

    type: str | None = None
    """None: a message."""
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    """The input of a call of a custom tool."""
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    status: str | None = None
    server_label: str | None = None
    """The label of the MCP server whose tool was called or whose tools are listed."""
    error: Any = None
    """Why a tool of an MCP server answered nothing."""
    # Accepted and ignored.
    tools: Any = None
    approval_request_id: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None
    caller: Any = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    # Accepted and ignored: thoughts are given in full.
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None
    """Accepted and ignored."""


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Accepted and ignored: nothing is padded."""


class ConversationName(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=64)]


class ResponsesRequest(GeneratingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's Responses with vLLM's sampling fields."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] = ""
    """Nothing: what is stored of the conversation says it all."""
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    conversation: Annotated[str, Meta(min_length=1, max_length=64)] | ConversationName | None = None
    """The conversation that the request continues and adds its items to."""
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: limits.MaxTokens | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """An input that does not fit is refused in either case."""

    stop: str | limits.Stops | None = None
    thinking_token_budget: limits.ThinkingBudget | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    include: list[str] | None = None
    """ "message.output_text.logprobs" is served; what else there is to include is left out."""
    top_logprobs: limits.Likeliest | None = None
    """The number of likely tokens for each token of the text, where `include` asks for them."""
    max_tool_calls: limits.ToolCalls | None = None
    """Calls of MCP servers' tools that are run; others are answered with an error."""

    # Accepted and ignored.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    client_metadata: Any = None
    # Not served.
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the request continues."""
        found = self.conversation
        return found.id if isinstance(found, ConversationName) else found

    @property
    def has_past(self) -> bool:
        """True if the request continues a stored conversation."""
        return self.previous_response_id is not None or self.conversation is not None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        for name, remedy in (
            ("prompt", "send the prompt's text"),
            ("context_management", "send what should be left of the conversation"),
            ("moderation", "nothing is moderated here"),
        ):
            if getattr(self, name):
                raise field_error(name, f"is not served: {remedy}")
        if self.background and not self.is_stored:
            raise field_error(
                "background", "answers are fetched later and so must be stored: leave out store"
            )
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "is only for stream = true")
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequestError(
                "conversation and previous_response_id both say what came before: give one of them",
                param="conversation",
            )
        if not self.input and not self.has_past:
            raise field_error("input", "is empty: give a text")
        check_free_form(self.tools, "tools")
        wanted = self.text.format if self.text is not None else None
        if wanted is not None and wanted.type not in ("text", "json_object", "json_schema"):
            raise field_error(
                "text.format",
                f"of type {shown(wanted.type)} is not served: use text, json_object or json_schema",
            )


RESPONSES = msgspec.json.Decoder(ResponsesRequest)


_OF_PROMPTS = frozenset((
    "instructions", "previous_response_id", "conversation", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "chat_template_kwargs",
))  # fmt: skip
"""Fields of a response that make its prompt, besides the input."""


class ResponseInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The conversation that a response would continue."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        self.request().check()

    def request(self) -> ResponsesRequest:
        """The request for that response."""
        names = (name for name in self.__struct_fields__ if name in _OF_PROMPTS)
        same = {name: getattr(self, name) for name in names}
        return ResponsesRequest(**same, input=self.input or "")


class InputTokensRequest(ResponseInput, kw_only=True, forbid_unknown_fields=True):
    """The fields of a response that make its prompt."""

    conversation: Annotated[str, Meta(min_length=1, max_length=64)] | ConversationName | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vllmx's own: variables of the template."""
    # Accepted and ignored.
    personality: Annotated[str, Meta(max_length=64)] | None = None


MAX_SUMMARY_TOKENS = 2048
REQUEST = """\
Summarize the conversation so far, so that somebody who reads nothing but your summary can go on \
with it. State what the user wants, what was decided and why, facts, names, numbers and paths that \
matter, what tools returned, and what is left to do. Answer with the summary alone."""
"""The last user message, which asks the model for the summary."""


class CompactRequest(ResponseInput, kw_only=True, forbid_unknown_fields=True):
    """A conversation to summarize."""

    # Accepted and ignored.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    image: Any = None

    stream = request_id = None  # it is never streamed, and takes no name
    max_output_tokens = MAX_SUMMARY_TOKENS

    def summary_request(self) -> ResponsesRequest:
        """The request for the summary, without thoughts."""
        items = self.input or []
        if isinstance(items, str):
            items = [InputItem("message", role="user", content=items)]
        return msgspec.structs.replace(
            self.request(),
            input=[*items, InputItem("message", role="user", content=REQUEST)],
            max_output_tokens=MAX_SUMMARY_TOKENS,
            reasoning=Reasoning(effort="none"),
            store=False,
        )


INPUT_TOKENS = msgspec.json.Decoder(InputTokensRequest)
COMPACT = msgspec.json.Decoder(CompactRequest)


MAX_ADDED = 20
"""Items in one request, as in OpenAI's API."""
MAX_ID = 128
Items = Annotated[list[InputItem], Meta(max_length=MAX_ADDED)]


class _NoModel(msgspec.Struct, forbid_unknown_fields=True):
    """A body without a model: conversations belong to none."""

    model = None

    def check(self) -> None:
        """Nothing depends on another field."""


class CreateConversation(_NoModel, kw_only=True, forbid_unknown_fields=True):
    items: Items | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        _check_ids(self.items or ())


class UpdateConversation(_NoModel, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata | None
    """Replaces the metadata; null clears it."""


class AddItems(_NoModel, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ADDED)]
    include: Any = None
    """Accepted and ignored."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        _check_ids(self.items)


def _check_ids(items: Sequence[InputItem]) -> None:
    for index, item in enumerate(items):
        if item.id is not None and len(item.id) > MAX_ID:
            raise field_error(
                f"items[{index}].id",
                f"has {len(item.id)} characters, at most {MAX_ID} are allowed:"
                " leave it out, and the item gets one",
            )


CREATE = msgspec.json.Decoder(CreateConversation)
UPDATE = msgspec.json.Decoder(UpdateConversation)
ADD = msgspec.json.Decoder(AddItems)
