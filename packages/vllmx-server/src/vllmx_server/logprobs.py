"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_engine.outputs import Logprob
from vllmx_engine.text.tokenizer import Tokenizer

Position = Mapping[int, Logprob]
"""The chosen token first, then the likeliest ones."""
FLOOR = -9999.0
"""JSON has no -inf; vLLM sends this."""


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def shown(token: int, text: str | None, as_id: bool | None) -> str:
    """A token as answers name it: by its text, or by its id (`return_tokens_as_token_ids`), since
    the texts of several tokens may be one."""
    return f"token_id:{token}" if as_id else text or ""


def chat_logprobs(
    positions: Sequence[Position],
    token_ids: Sequence[int],
    top: int,
    tokenizer: Tokenizer,
    as_ids: bool | None,
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": shown(token, logprob.decoded_token, as_ids),
            "logprob": finite(logprob.logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for token, position in zip(token_ids, positions, strict=True):
        likeliest = sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]
        content.append(
            {
                **entry(token, position[token]),
                "top_logprobs": [entry(other, logprob) for other, logprob in likeliest],
            }
        )
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, filled position by position."""

    def __init__(self, as_ids: bool | None) -> None:
        self._as_ids = as_ids
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_first_prompt_token(self, token: int, text: str) -> None:
        """The first token of a prompt has no probability."""
        self.tokens.append(shown(token, text, self._as_ids))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(0)

    def add(self, token: int, position: Position, offset: int) -> None:
        chosen = position[token]
        self.tokens.append(shown(token, chosen.decoded_token, self._as_ids))
        self.token_logprobs.append(finite(chosen.logprob))
        top: dict[str, float] = {}
        for other, entry in position.items():  # of one text: the chosen, else the likeliest
            name = shown(other, entry.decoded_token, self._as_ids)
            top.setdefault(name, finite(entry.logprob))
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: a mapping by token id for each prompt token, null for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]
