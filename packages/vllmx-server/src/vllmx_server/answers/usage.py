"""Token counts, in the form of OpenAI's API."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from vllmx_server.answers.record import Record


class PromptTokens(Record, kw_only=True):
    cached_tokens: int
    """Found in the prefix cache."""


class CompletionTokens(Record, kw_only=True):
    reasoning_tokens: int
    """The tokens of thoughts."""


class TokenUsage(Record, kw_only=True):
    """Counts of tokens over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET
    """The details of the completion, where thoughts are separated from content."""


class PoolingUsage(Record, kw_only=True):
    """The usage of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int
