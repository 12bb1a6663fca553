"""The sampling fields that chat and text completions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_BIAS_ENTRIES, SamplingParams, listing

from vllmx_server.schema.unserved import (
    ResponseFormat,
    UnservedFields,
    check_response_format,
    check_unserved,
)

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose default the model's generation_config.json may set."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send a last chunk with the usage and no choices. Not said: as `continuous_usage_stats`."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk, unless `include_usage` is false."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: nothing is padded."""

    @property
    def has_usage(self) -> bool:
        """The stream tells the usage, at its end or with each chunk."""
        asked = self.include_usage
        return bool(self.continuous_usage_stats if asked is None else asked)


class SamplingFields(UnservedFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields first, then vLLM's extensions; None always means: not given."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None

    # Accepted and ignored, because clients send them by default and they change no token.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    stream_interval: int | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only for stream = true: set stream or leave it out",
                param="stream_options",
            )
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequestError(
                f"best_of = {self.best_of} cannot be streamed, because the best choices are known"
                " only at the end: leave out stream or best_of",
                param="best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs"
            )
        if not -(1 << 31) <= (self.priority or 0) < 1 << 31:
            raise InvalidRequestError(
                f"priority must fit into 32 bits, got {self.priority}", param="priority"
            )
        for name in ("request_id", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not 0 < len(value) <= 128:
                raise InvalidRequestError(
                    f"{name} must have 1 to 128 characters, got {len(value)}", param=name
                )
        check_response_format(self.response_format)
        check_unserved(self)

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request's parameters over the model's defaults. Raises InvalidRequestError."""
        values: dict[str, Any] = {k: v for k, v in defaults.items() if k in DEFAULTED}
        for name in (
            *DEFAULTED, "frequency_penalty", "presence_penalty", "n", "best_of", "seed", "stop",
            "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
            "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
            "allowed_token_ids", "bad_words", "truncate_prompt_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)


def _logit_bias(entries: dict[str, float]) -> dict[int, float]:
    if len(entries) > MAX_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias has {len(entries)} entries, at most {MAX_BIAS_ENTRIES} are allowed",
            param="logit_bias",
        )
    bad = [key for key in entries if not (key.isascii() and key.isdigit() and len(key) < 11)]
    if bad:
        raise InvalidRequestError(
            f"logit_bias keys must be token ids, got {listing(bad)}", param="logit_bias"
        )
    return {int(token): value for token, value in entries.items()}
