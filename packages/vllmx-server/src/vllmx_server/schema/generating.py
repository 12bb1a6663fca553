"""The fields of every route that generates text."""

from __future__ import annotations

from typing import Any

from vllmx_server.schema import intervals as limits
from vllmx_server.schema.structured import GuidedFields, ResponseFormat


class GeneratingFields(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats, completions, Responses and Messages share; None means not given.
    `MessagesRequest` has another base, so it repeats them, and a test compares both."""

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


GENERATING = GeneratingFields.__struct_fields__


class StructuredFields(GeneratingFields, kw_only=True, forbid_unknown_fields=True):
    """Formats of chats and completions; a request gives at most one."""

    response_format: ResponseFormat | None = None
    grammar: str | None = None
    """llama.cpp's field for GBNF; it also takes Lark."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's field."""
