"""How many log-probabilities a call may bring: each is some fifty bytes, here and in its answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.bounds import MAX_TOKENS_LIMIT
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams

MAX_CALL_LOGPROBS = 1 << 21
"""The most log-probabilities over all prompts, choices and tokens: one choice of 99,864 tokens with
the 20 likeliest each."""


def resolve_logprobs(name: str, wanted: int | None, limit: int, vocab_size: int) -> int | None:
    """How many of the likeliest ids a request gets that wants so many, or -1 for all.

    Args:
        name: the request's field.
        limit: `EngineConfig.max_logprobs`.

    Raises:
        InvalidRequestError: more than `limit` allows.
    """
    if wanted is None:
        return None
    number = vocab_size if wanted == -1 else wanted
    if number >= 0 and (limit < 0 or number <= limit):
        return min(number, vocab_size)
    got = f"-1, for all {vocab_size} of the vocabulary" if wanted == -1 else str(wanted)
    raise InvalidRequestError(
        f"{name} must be between 0 and {limit}, got {got}: lower it, or raise --max-logprobs (-1:"
        " no limit)",
        param=name,
    )


def most_scored_tokens(params: SamplingParams) -> int:
    """Tokens of each choice where the call names no max_tokens."""
    if params.logprobs is None:
        return MAX_TOKENS_LIMIT
    return max(1, MAX_CALL_LOGPROBS // (params.num_choices * (params.logprobs + 1)))


def check_logprobs(params: SamplingParams, lengths: Sequence[tuple[int, int]]) -> None:
    """Raises InvalidRequestError where these could bring more than `MAX_CALL_LOGPROBS`.

    Args:
        lengths: of each prompt of the call (tokens of it, tokens to generate at most).
    """
    of_tokens = of_prompts = 0
    if params.logprobs is not None:
        generated = sum(max_tokens for _, max_tokens in lengths)
        of_tokens = params.num_choices * generated * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        of_prompts = sum(prompt for prompt, _ in lengths) * (params.prompt_logprobs + 1)
    if of_tokens + of_prompts > MAX_CALL_LOGPROBS:
        name = "logprobs" if of_tokens >= of_prompts else "prompt_logprobs"
        raise InvalidRequestError(
            f"the call may bring {of_tokens} log-probabilities of generated tokens and {of_prompts}"
            f" of prompts, at most {MAX_CALL_LOGPROBS} in all are served: lower {name}, n or"
            " max_tokens, or split the call",
            param=name,
        )
