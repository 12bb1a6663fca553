"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.generating.chat_body import MAX_MESSAGES
from vllmx_server.generating.fields import GuidedFields, field_error
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form

MAX_TOOLS = 1024


class Block(msgspec.Struct):
    """One piece of a turn; which fields belong to it says its type. Other keys are ignored, such as
    `cache_control` and what our answers do not have."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    source: Any = None


class Turn(msgspec.Struct):
    """A message; other keys are ignored."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct):
    """A tool that the client runs; other keys are ignored."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: limits.BudgetTokens | None = None
    """The type "enabled" must have it, no other may."""
    display: Literal["summarized", "omitted"] | None = None
    """"summarized" shows all of it."""

    @property
    def is_enabled(self) -> bool:
        return self.type == "enabled"


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that make the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The beta's name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vllmx's own: the template's switches."""
    # Accepted and ignored.
    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None
    # Not served.
    mcp_servers: Any = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.mcp_servers:
            raise field_error("mcp_servers", "is not served: give the tools themselves")
        thinking = self.thinking
        if thinking is not None and (thinking.budget_tokens is None) == thinking.is_enabled:
            wrong = "needs" if thinking.is_enabled else "takes no"
            raise InvalidRequestError(
                f"thinking of type {thinking.type!r} {wrong} budget_tokens",
                param="thinking.budget_tokens",
            )
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom") or tool.input_schema is None:
                kind = f"type {shown(tool.type)}" if tool.type else "no input_schema"
                raise field_error(
                    f"tools[{index}]",
                    f"has {kind}: only tools that the client runs are served; give"
                    " name, description and input_schema",
                )
            check_free_form(tool.input_schema, f"tools[{index}].input_schema")
        if self.format is not None and self.output_format not in (None, self.format):
            raise InvalidRequestError(
                "output_config.format and output_format differ: give one of them",
                param="output_format",
            )
        check_free_form(self.chat_template_kwargs, "chat_template_kwargs")
        check_free_form(self.messages, "messages")

    @property
    def format(self) -> OutputFormat | None:
        """The format that the answer must have."""
        own = None if self.output_config is None else self.output_config.format
        return self.output_format if own is None else own


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's Messages with vLLM's sampling fields, as in `GeneratingFields`."""

    max_tokens: limits.MaxTokens
    stream: bool | None = None
    stop_sequences: limits.Stops | None = None
    temperature: limits.Temperature | None = None
    top_p: limits.TopP | None = None
    top_k: limits.TopK | None = None
    min_p: limits.MinP | None = None
    frequency_penalty: limits.Penalty | None = None
    presence_penalty: limits.Penalty | None = None
    repetition_penalty: limits.Factor | None = None
    logit_bias: limits.Biases | None = None
    allowed_token_ids: limits.AllowedIds | None = None
    bad_words: limits.BadWords | None = None
    seed: limits.Seed | None = None
    min_tokens: limits.MinTokens | None = None
    stop_token_ids: limits.StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: limits.Truncation | None = None
    priority: limits.Priority | None = None
    request_id: limits.Name | None = None
    cache_salt: limits.Name | None = None
    session_id: limits.Name | None = None
    # Accepted and ignored.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    # Not served.
    container: Any = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        CountTokensRequest.check(self)
        if self.container is not None:
            raise field_error("container", "is not served: nothing is executed here, leave it out")
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens and not self.tools:
            # with tools, a turn of several answers may think more than one of them may say
            raise field_error(
                "thinking.budget_tokens",
                f"is {budget}, which must be less than max_tokens,"
                f" {self.max_tokens}: raise max_tokens, or think less",
            )


class BetaCountTokensRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=False):
    """A request with an `anthropic-beta` header. Unknown fields are ignored, since beta parameters
    come and go."""


class BetaMessagesRequest(MessagesRequest, kw_only=True, forbid_unknown_fields=False):
    """A Messages request with an `anthropic-beta` header."""


MESSAGES = msgspec.json.Decoder(MessagesRequest)
COUNT_TOKENS = msgspec.json.Decoder(CountTokensRequest)
BETA_MESSAGES: msgspec.json.Decoder[MessagesRequest] = msgspec.json.Decoder(BetaMessagesRequest)
BETA_COUNT_TOKENS: msgspec.json.Decoder[CountTokensRequest] = msgspec.json.Decoder(
    BetaCountTokensRequest
)
