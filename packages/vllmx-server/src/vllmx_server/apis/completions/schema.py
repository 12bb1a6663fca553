"""Body and answers of POST /v1/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from vllmx_core.errors import shown

from vllmx_server.generating.answers import PromptLogprobs, RequestTimings, TextLogprobs, TokenUsage
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.record import Record

MAX_PROMPTS = 256
"""Prompts in one call."""


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's text completion with vLLM's extensions."""

    prompt: str | list[str | limits.TokenId | list[limits.TokenId]]
    """A text, a list of token ids, or a list of either."""
    max_tokens: limits.MinTokens | msgspec.UnsetType | None = msgspec.UNSET
    """None: as many as the context holds. Not given: 16, or what the context has room for."""
    logprobs: limits.Likeliest | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """None: special tokens are added."""

    suffix: str | None = None
    """The text behind the wanted one, for models that were trained to fill in."""

    # Taken where they ask for what is done anyway: see `unserved`.
    prompt_embeds: Any = None
    thinking_token_budget: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises InvalidRequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise field_error("prompt", "is an empty list: give a text")
        if all(isinstance(item, int) for item in prompt):
            return [[item for item in prompt if isinstance(item, int)]]
        if any(isinstance(item, int) for item in prompt):
            raise field_error(
                "prompt",
                "mixes token ids with other items: give one list of ids, or a list of texts"
                " or lists of ids",
            )
        if len(prompt) > MAX_PROMPTS:
            raise field_error(
                "prompt",
                f"has {len(prompt)} entries, at most {MAX_PROMPTS} are served in one call:"
                " split it",
            )
        return [item for item in prompt if not isinstance(item, int)]

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context holds."""
        if self.scores_only:
            return 1  # drawn and dropped: the model must run to score the prompt
        return 16 if isinstance(self.max_tokens, msgspec.UnsetType) else self.max_tokens

    @property
    def scores_only(self) -> bool:
        """Nothing is generated: the prompt comes back, with its logprobs where they are wanted."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self) -> None:
        SamplingFields.check(self)
        if self.thinking_token_budget not in (None, -1):
            raise field_error(
                "thinking_token_budget",
                f"= {shown(self.thinking_token_budget)} is not served:"
                " only the answers of chats separate thoughts from content",
            )
        self.check_streamed("logprobs", self.logprobs)
        self.check_named(self.logprobs is not None)
        if self.logprob_token_ids and self.scores_only:
            raise field_error(
                "logprob_token_ids",
                "is about generated tokens, and max_tokens = 0 generates none: use prompt_logprobs",
            )
        if self.suffix and self.echo:
            raise field_error(
                "echo",
                "repeats the text before the answer, and with suffix that is not all of"
                " the prompt: leave out one of them",
            )


DECODER = msgspec.json.Decoder(CompletionRequest)


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
