"""Answers of POST /v1/completions."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from vllmx_server.generating.logprobs_answer import PromptLogprobs, TextLogprobs
from vllmx_server.generating.usage_answer import RequestTimings, TokenUsage
from vllmx_server.schema.record import Record

FinishReason = Literal["stop", "length", "abort", "error"]


class TextChoice(Record, kw_only=True):
    """Choice j of prompt i has the index i * n + j."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or the stop token that ended it."""
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class TextCompletion(Record, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: TokenUsage
    metrics: RequestTimings | UnsetType = UNSET
    """The times of a request with one choice, under `--enable-per-request-metrics`."""


class TextChunkChoice(Record, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChunk(Record, kw_only=True):
    """One event of a stream; the last one before `[DONE]` has the usage and no choices, where
    `stream_options` asks for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    metrics: RequestTimings | UnsetType = UNSET
    """The times of the request, in the last chunk alone, with the usage."""
