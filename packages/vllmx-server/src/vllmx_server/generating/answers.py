"""Structs of chat completions, token counts and log-probabilities."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from vllmx_server.schema.record import Record


class TopLogprob(Record, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    """The token's own, which may be a part of a character."""


class TokenLogprob(TopLogprob, kw_only=True):
    """One token of a chat's answer."""

    top_logprobs: list[TopLogprob]
    """The likeliest, the first one first."""


class ChatLogprobs(Record, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Record, kw_only=True):
    """One entry for each token; with `echo` those of the prompt come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """The offset in the text at which each token begins."""


class PromptLogprob(Record, kw_only=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""A mapping by token id for each token of the prompt, null for the first."""


class PromptTokens(Record, kw_only=True):
    cached_tokens: int
    """Found in the prefix cache."""


class CompletionTokens(Record, kw_only=True):
    reasoning_tokens: int
    """The tokens of thoughts."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Draft tokens that became part of the answer, where there were drafts."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Draft tokens that did not; `completion_tokens` does not count them."""


class TokenUsage(Record, kw_only=True):
    """Counts of tokens over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET
    """The details of the completion, where thoughts are separated from content, or tokens were
    drafted."""


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
    """The part of the message that a chunk adds."""

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
