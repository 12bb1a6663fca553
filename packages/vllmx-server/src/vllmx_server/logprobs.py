"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllmx_engine.client.logprob_rows import LogprobRows
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.outputs import Logprob

from vllmx_server.json_pieces import Items

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

    def row(token: int, position: Position) -> dict[str, Any]:
        likeliest = sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]
        return {
            **entry(token, position[token]),
            "top_logprobs": [entry(other, logprob) for other, logprob in likeliest],
        }

    return {"content": Items(map(row, token_ids, positions)), "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion: of its prompt first, then of its tokens."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool | None) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._parts: list[tuple[Sequence[int], LogprobRows, Iterable[int]]] = []

    def add(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
        offsets: Sequence[int],
        shift: int = 0,
    ) -> None:
        """Tokens that follow, with where each begins in the text, `shift` characters later."""
        assert isinstance(positions, LogprobRows)
        self._parts.append((token_ids, positions, [shift + offset for offset in offsets]))

    def as_dict(self) -> dict[str, Any]:
        """Its arrays are made while they are encoded."""
        rows = [(ids, positions) for ids, positions, _ in self._parts]
        return {
            "tokens": Items(self._text(token) for ids, _ in rows for token in ids),
            "token_logprobs": Items(
                None if logprob is None else finite(logprob)
                for _, positions in rows
                for logprob in positions.of_tokens()
            ),
            "top_logprobs": Items(
                self._top(position) for _, positions in rows for position in positions
            ),
            "text_offset": Items(offset for _, _, offsets in self._parts for offset in offsets),
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def _top(self, position: Position | None) -> dict[str, float] | None:
        if position is None:
            return None
        top: dict[str, float] = {}
        for token, entry in position.items():  # of one text: the chosen, else the likeliest
            name = shown(token, entry.decoded_token, self._as_ids)
            top.setdefault(name, finite(entry.logprob))
        return top


def prompt_logprobs(positions: Sequence[Position | None] | None) -> Items | None:
    """vLLM's `prompt_logprobs`: a mapping by token id for each prompt token, null for the first."""
    return None if positions is None else Items(map(_prompt_row, positions))


def _prompt_row(position: Position | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in position.items()
    }
