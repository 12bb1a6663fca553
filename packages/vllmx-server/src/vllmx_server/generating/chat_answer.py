"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from vllmx_server.generating.logprobs_answer import ChatLogprobs, PromptLogprobs
from vllmx_server.generating.usage_answer import RequestTimings, TokenUsage
from vllmx_server.schema.record import Record

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class CalledFunction(Record, kw_only=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class CalledTool(Record, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Record, kw_only=True):
    """A turn that can be sent back as it is."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    """Thoughts, of a model that has some."""
    reasoning: str | UnsetType | None = UNSET
    """The same, under vLLM's newer name."""
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Record, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or the stop token that ended it."""
    token_ids: list[int] | None


class ChatCompletion(Record, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    metrics: RequestTimings | UnsetType = UNSET
    """The times of a request with one choice, under `--enable-per-request-metrics`."""


class FunctionDelta(Record, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Record, kw_only=True):
    """The first one of a call has its id, its type and its name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Record, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Record, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Record, kw_only=True):
    """One event of a stream; the last one before `[DONE]` has the usage and no choices, where
    `stream_options` asks for it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    metrics: RequestTimings | UnsetType = UNSET
    """The times of the request, in the last chunk alone, with the usage."""
    prompt_token_ids: list[int] | UnsetType = UNSET
