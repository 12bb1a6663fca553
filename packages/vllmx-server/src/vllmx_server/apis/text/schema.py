"""Bodies and answers of POST /tokenize and POST /detokenize (vLLM's shapes)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat import ChatOptions

from vllmx_server.generating.chat_body import (
    MAX_MESSAGES,
    MAX_TEMPLATE,
    ChatMessage,
    check_messages,
    generation_prompt,
)
from vllmx_server.generating.tools import MAX_TOOLS, check_tools, tool_list
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form
from vllmx_server.schema.record import Record


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request with either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, false for messages, whose template writes its own."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    """None: the prompt is added unless `continue_final_message` is true."""
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE)] | None = None
    """Only where the operator trusts clients with it."""
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if self.messages is not None:
            check_messages(self.messages)
        check_tools(self.tools)
        check_free_form(self.chat_template_kwargs, "chat_template_kwargs")

    def chat_options(self) -> ChatOptions:
        """The options for rendering `messages`. Raises InvalidRequestError."""
        return ChatOptions(
            tools=tool_list(self.tools),
            add_generation_prompt=generation_prompt(
                self.add_generation_prompt, self.continue_final_message
            ),
            continue_final_message=bool(self.continue_final_message),
            source=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[limits.TokenId]
    skip_special_tokens: bool | None = None

    def check(self) -> None:
        """Nothing depends on another field."""


TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class Tokenized(Record, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Record, kw_only=True):
    prompt: str
