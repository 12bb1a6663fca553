"""Which of an answer's log-probabilities belong to its content, not to thoughts and calls."""

from __future__ import annotations

import codecs

from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.client.logprob_rows import LogprobRows
from vllmx_engine.formats.events import ContentPiece
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import TokenLogprobs
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.generating.logprobs import chat_entry
from vllmx_server.generating.logprobs_answer import TokenLogprob


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
            num_tokens -= 1  # the token that ended the answer is no text
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
        """What content is told now that a token's text was read; None while nothing is told."""
        if self._reader is None:
            return text or None
        events = self._reader.push(text)
        content = "".join(event.text for event in events if isinstance(event, ContentPiece))
        return content or ("" if events else None)

    def _decide(self, content: str, tokenizer: Tokenizer) -> None:
        """Takes those of the tokens so far as content whose text is in what was told. Those in
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
