"""Bounds on a request's lists: token ids, log-probabilities, and rules about tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllmx_core.bounds import MAX_TOKENS_LIMIT
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams

_PIECE = 1 << 16


def checked_ids(ids: Any) -> list[int]:
    """A list of what a user gave as token ids. Raises InvalidRequestError."""
    if hasattr(ids, "tolist"):  # a numpy array
        ids = ids.tolist()
    found: list[int] = []
    try:
        for piece in _pieces(ids) if isinstance(ids, list | tuple) else [ids]:
            found += msgspec.convert(piece, list[int])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids: {_told(ids, error)}", param="prompt"
        ) from error
    return found


def _told(ids: Any, error: msgspec.ValidationError) -> msgspec.ValidationError:
    """The error of one call for all, which tells the place in the whole list."""
    try:
        msgspec.convert(ids, list[int])
    except msgspec.ValidationError as found:
        return found
    return error


def id_outside(ids: Sequence[int], size: int) -> int | None:
    """An id that is not one of `size`: the lowest if that is negative, else the highest."""
    if not ids:
        return None
    lowest = min(map(min, _pieces(ids)))
    if lowest < 0:
        return lowest
    highest = max(map(max, _pieces(ids)))
    return highest if highest >= size else None


def _pieces(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[begin : begin + _PIECE] for begin in range(0, len(ids), _PIECE))


MAX_CALL_LOGPROBS = 1 << 21
"""The most log-probabilities over all prompts, choices and tokens: one choice of 99,864 tokens with
the 20 most likely each."""


def resolve_logprobs(name: str, wanted: int | None, limit: int, vocab_size: int) -> int | None:
    """Returns the number of most likely ids for a request that wants `wanted`, or -1 for all.

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


def check_encoded(params: SamplingParams) -> None:
    """Raises InvalidRequestError for what an encoder-decoder has not of its prompts."""
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs are those of a decoder, and this model's encoder reads the prompt:"
            " leave prompt_logprobs, or echo with logprobs, out",
            param="prompt_logprobs",
        )


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


MAX_CALL_RULES = 1 << 21
"""The most rules over all prompts of a call: four with the longest `allowed_token_ids`, eight with
as much in `bad_words`, and any number with what is usual."""


def check_rules(params: SamplingParams, num_prompts: int) -> None:
    """Raises InvalidRequestError where the ids and characters of all prompts' rules are more than
    `MAX_CALL_RULES`."""
    sizes = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words)),
        "logit_bias": len(params.logit_bias),
        "stop": sum(map(len, params.stop)),
        "stop_token_ids": len(params.stop_token_ids),
    }
    total = num_prompts * sum(sizes.values())
    if total > MAX_CALL_RULES:
        longest = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequestError(
            f"the call has {num_prompts} prompts with {sum(sizes.values())} ids and characters each"
            f" in {', '.join(name for name in sizes if sizes[name])}, at most {MAX_CALL_RULES} in"
            f" all are served: shorten {longest}, or split the call",
            param=longest,
        )
