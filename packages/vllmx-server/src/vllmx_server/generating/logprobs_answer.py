"""Log-probabilities, in OpenAI's two shapes and vLLM's."""

from __future__ import annotations

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
