"""Token counts, in the form of OpenAI's API."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from vllmx_server.schema.record import Record


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


class RequestTimings(Record, kw_only=True):
    """The times of a request; null: that did not happen."""

    time_to_first_token_ms: float | None = None
    """The time from the end of the queue to the first token."""
    generation_time_ms: float | None = None
    """The time from the first token to the last."""
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    """The mean time between two tokens, of an answer with at least two."""
    tokens_per_second: float | None = None
    """The tokens over the time from the end of the queue to the last one."""
