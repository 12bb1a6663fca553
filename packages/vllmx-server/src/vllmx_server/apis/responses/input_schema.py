"""POST /v1/responses/input_tokens and /v1/responses/compact."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllmx_server.apis.responses.compaction import MAX_SUMMARY_TOKENS, REQUEST
from vllmx_server.apis.responses.schema import (
    MAX_TOOLS,
    ConversationName,
    InputItem,
    Reasoning,
    ResponsesRequest,
    TextOptions,
)
from vllmx_server.generating.chat_body import MAX_MESSAGES


class ResponseInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The conversation that a response would continue."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None


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

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        self.request().check()

    def request(self) -> ResponsesRequest:
        """The request for the response whose prompt is counted."""
        return ResponsesRequest(
            input=self.input or "",
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            conversation=self.conversation,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            text=self.text,
            reasoning=self.reasoning,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class CompactRequest(ResponseInput, kw_only=True, forbid_unknown_fields=True):
    """A conversation to summarize."""

    # Accepted and ignored.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    image: Any = None

    @property
    def stream(self) -> None:
        """The answer is never streamed."""

    @property
    def request_id(self) -> None:
        """The request has no name of its own."""

    @property
    def max_output_tokens(self) -> int:
        return MAX_SUMMARY_TOKENS

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        self.past().check()

    def past(self) -> ResponsesRequest:
        """The conversation itself."""
        return ResponsesRequest(
            input=self.input or "",
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
        )

    def request(self) -> ResponsesRequest:
        """The request for the summary, without thoughts."""
        items = self.input or []
        if isinstance(items, str):
            items = [InputItem("message", role="user", content=items)]
        return ResponsesRequest(
            input=[*items, InputItem("message", role="user", content=REQUEST)],
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            max_output_tokens=MAX_SUMMARY_TOKENS,
            reasoning=Reasoning(effort="none"),
            store=False,
        )


INPUT_TOKENS = msgspec.json.Decoder(InputTokensRequest)
COMPACT = msgspec.json.Decoder(CompactRequest)
