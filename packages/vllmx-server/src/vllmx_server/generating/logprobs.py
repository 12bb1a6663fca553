"""Log-probabilities in OpenAI's two shapes, and those of an answer's content."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.client.logprob_rows import LogprobRows, decode_logprobs
from vllmx_engine.formats.events import ContentPiece
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import TokenLogprobs
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.generating.answers import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)
from vllmx_server.schema.record import lazily, lazy_members

FLOOR = -9999.0
"""JSON has no -inf; vLLM sends this."""


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def is_long(row: TokenLogprobs) -> bool:
    """True if making all of it at once would hold up the event loop."""
    return bool(row.packed)


def token_name(token: int, text: str | None, as_id: bool | None) -> str:
    """A token as answers name it: by its text, or by its id (`return_tokens_as_token_ids`), since
    the texts of several tokens may be one."""
    return f"token_id:{token}" if as_id else text or ""


def chat_logprobs(
    positions: Sequence[Any],
    token_ids: Sequence[int],
    top: int,
    tokenizer: Tokenizer,
    as_ids: bool | None,
) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion; `top`: -1: of all that there are."""
    assert isinstance(positions, LogprobRows)
    rows = (chat_entry(row, top, tokenizer, as_ids) for row in positions.rows[: len(token_ids)])
    return ChatLogprobs(content=lazily(rows))


def chat_entry(
    position: TokenLogprobs | None, top: int, tokenizer: Tokenizer, as_ids: bool | None = None
) -> TokenLogprob:
    """One token of a chat completion, with the `top` likeliest; -1: with all that there are."""

    def entry(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=token_name(token, tokenizer.token_text(token), as_ids),
            logprob=finite(logprob),
            bytes=list(tokenizer.token_bytes(token)),
        )

    assert position is not None, "a generated token has its log-probability"
    likeliest = islice(position.ranked(), None if top < 0 else top)
    entries = (entry(token, logprob) for token, logprob in likeliest)
    own = entry(position.token, position.logprob)
    return TokenLogprob(
        token=own.token,
        logprob=own.logprob,
        bytes=own.bytes,
        top_logprobs=lazily(entries) if is_long(position) else list(entries),
    )


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion: of its prompt first, then of its tokens."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool | None) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._parts: list[tuple[Sequence[int], LogprobRows, Iterable[int]]] = []

    def add(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Any],
        offsets: Sequence[int],
        shift: int = 0,
    ) -> None:
        """Tokens that follow, with where each begins in the text, `shift` characters later."""
        assert isinstance(positions, LogprobRows)
        self._parts.append((token_ids, positions, [shift + offset for offset in offsets]))

    def shown(self) -> TextLogprobs:
        """The struct of an answer, whose arrays are made while they are encoded."""
        rows = [(ids, positions) for ids, positions, _ in self._parts]
        return TextLogprobs(
            tokens=lazily(
                token_name(token, self._tokenizer.token_text(token), self._as_ids)
                for ids, _ in rows
                for token in ids
            ),
            token_logprobs=lazily(
                None if logprob is None else finite(logprob)
                for _, positions in rows
                for logprob in positions.of_tokens()
            ),
            top_logprobs=lazily(self._top(row) for _, positions in rows for row in positions.rows),
            text_offset=lazily(offset for _, _, offsets in self._parts for offset in offsets),
        )

    def _top(self, row: TokenLogprobs | None) -> dict[str, float] | None:
        if row is None:
            return None
        if is_long(row):
            return lazy_members(self._named(row))
        return dict(member for member in self._named(row) if member is not None)

    def _named(self, row: TokenLogprobs) -> Iterator[tuple[str, float] | None]:
        """Each name once: of tokens with one text the chosen, else the likeliest; None for the
        others, which may be nearly all of a vocabulary."""
        seen: set[str] = set()
        for token, entry in decode_logprobs(row, self._tokenizer):
            name = token_name(token, entry.decoded_token, self._as_ids)
            if name in seen:
                yield None
            else:
                seen.add(name)
                yield name, finite(entry.logprob)


def prompt_logprobs(positions: Sequence[Any] | None) -> PromptLogprobs | None:
    """vLLM's `prompt_logprobs`: a mapping by token id for each prompt token, null for the first."""
    if positions is None:
        return None
    assert isinstance(positions, LogprobRows)
    return lazily(_prompt_row(row, positions.tokenizer) for row in positions.rows)


def _prompt_row(row: TokenLogprobs | None, tokenizer: Tokenizer) -> dict[str, PromptLogprob] | None:
    if row is None:
        return None
    members = (
        (
            str(token),
            PromptLogprob(
                logprob=finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token
            ),
        )
        for token, entry in decode_logprobs(row, tokenizer)
    )
    return lazy_members(members) if is_long(row) else dict(members)


class ContentLogprobs:
    """Gathers them for one choice. The tokens are read one by one, so that it does not matter how
    many of them an output brings.

    Args:
        readers: of the answers; None where all is content.
        top: how many of the likeliest each entry has.
    """

    def __init__(self, readers: AnswerReaders | None, top: int) -> None:
        self._reader = None if readers is None else readers.reader()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._top = top
        self._undecided: list[tuple[str, TokenLogprobs | None]] = []
        """Tokens that may be the first part of a marker, or of a character."""
        self._entries: list[TokenLogprob] = []

    def add(self, choice: CompletionOutput) -> None:
        """Takes the tokens of an output."""
        rows = choice.logprobs
        if rows is None:
            return
        assert isinstance(rows, LogprobRows)
        num_tokens = len(choice.token_ids)
        if choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str):
            num_tokens -= 1  # the token that ended the answer is not text
        for token, row in zip(choice.token_ids[:num_tokens], rows.rows, strict=False):
            text = self._decode(rows.tokenizer.token_bytes(token))
            self._undecided.append((text, row))
            told = self._told(text)
            if told is not None:
                self._decide(told, rows.tokenizer)
        if choice.finish_reason is not None and self._reader is None:
            rest, self._undecided = self._undecided, []
            self._entries += (chat_entry(row, self._top, rows.tokenizer) for _, row in rest)

    def _told(self, text: str) -> str | None:
        """The content that is known once a token's text was read; None while nothing is decided."""
        if self._reader is None:
            return text or None
        events = self._reader.push(text)
        content = "".join(event.text for event in events if isinstance(event, ContentPiece))
        return content or ("" if events else None)

    def _decide(self, content: str, tokenizer: Tokenizer) -> None:
        """Takes those of the tokens so far as content whose text is in that content. Those in
        front of them are markers, and those behind them may become one."""
        start = "".join(text for text, _ in self._undecided).rfind(content)
        at, end = 0, start + len(content)
        waiting = []
        for text, row in self._undecided:
            if start >= 0 and at >= end:
                waiting.append((text, row))
            elif start >= 0 and (at + len(text) > start or at == start):
                self._entries.append(chat_entry(row, self._top, tokenizer))
            at += len(text)
        self._undecided = waiting

    def take(self) -> list[TokenLogprob]:
        """Entries that nobody has taken yet."""
        found, self._entries = self._entries, []
        return found
