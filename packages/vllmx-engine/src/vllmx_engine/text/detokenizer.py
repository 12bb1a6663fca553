"""Incremental detokenizer: ids of one sequence in, newly stable text out.

Where the tokenizer's text is a concatenation of bytes per token (see `pieces`), a token costs one
dictionary look-up; only while a character is split over tokens are bytes joined and decoded. Other
tokenizers are decoded through a window of the last few ids, as vLLM does.

The text is that of the whole sequence less what the prompt already shows: a leading space is kept
after a prompt and stripped at the start of a text, and a character whose first bytes are the last
of the prompt belongs to the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from vllmx_engine.text.pieces import PieceCoding, PieceTable, TextTable
from vllmx_engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
_MAX_PENDING_TOKENS = 16


class Detokenizer(Protocol):
    """One sequence's ids to text. Not thread-safe; one object per sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids, in order; return the text that no later id can change."""

    def finish(self) -> str:
        """The rest: U+FFFD for an incomplete character, else nothing. Call once, at the end."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    kept_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The fastest exact detokenizer for this tokenizer.

    Args:
        prompt_ids: the ids before the output; only both ends are read.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: False joins neighbouring special tokens without the space
            that some decoders (never the concatenating ones) put between tokens.
        kept_ids: special tokens that give text all the same.
    """
    coding = tokenizer.coding
    hidden = tokenizer.special_ids - kept_ids if skip_special_tokens else frozenset[int]()
    tables = tokenizer.tables(hidden)
    if coding is not None and tables is not None:
        return PieceDetokenizer(coding, *tables, prompt_ids)
    joined = frozenset[int]()
    if not (skip_special_tokens or spaces_between_special_tokens):
        joined = tokenizer.special_ids
    return WindowDetokenizer(tokenizer, prompt_ids, hidden, joined)


class PieceDetokenizer:
    """Concatenates the bytes of tokens; for byte-level and SentencePiece style tokenizers."""

    __slots__ = ("_clean", "_coding", "_pending", "_pieces", "_strip_left", "_texts")

    def __init__(
        self,
        coding: PieceCoding,
        pieces: PieceTable,
        texts: TextTable,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._coding = coding
        self._pieces = pieces
        self._texts = texts
        self._pending = self._incomplete_tail(prompt_ids)
        prompt_has_text = coding.strip_count and any(pieces[i] for i in prompt_ids)
        self._strip_left = 0 if prompt_has_text else coding.strip_count
        self._clean = not self._pending and not self._strip_left

    def push(self, ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        if self._clean and len(ids) == 1:
            text = self._texts[ids[0]]
            if text is not None:
                return text
        data = self._pending + b"".join([self._pieces[token_id] for token_id in ids])
        text, used = codecs.utf_8_decode(data, self._coding.errors, False)
        self._pending = data[used:]
        if self._strip_left and text:
            text = self._stripped(text)
        self._clean = not self._pending and not self._strip_left
        return text

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        text, _ = codecs.utf_8_decode(self._pending, self._coding.errors, True)
        self._pending = b""
        return text

    def _stripped(self, text: str) -> str:
        start = 0
        while start < self._strip_left and text.startswith(self._coding.strip_char, start):
            start += 1
        self._strip_left = self._strip_left - start if start == len(text) else 0
        return text[start:]

    def _incomplete_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Bytes at the end of the prompt that begin a character: at most 3."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._pieces[token_id] + tail
            if len(tail) >= 4:
                break
        _, used = codecs.utf_8_decode(tail, "replace", False)
        return tail[used:]


class WindowDetokenizer:
    """Decodes the last few ids again at each token; for any tokenizer.

    `ids[prefix:read]` has been shown; a new token is shown as what it adds to the decoded window,
    once that no longer ends in an incomplete character.
    """

    __slots__ = ("_hidden", "_ids", "_joined", "_last_joined", "_read", "_shown", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        hidden: frozenset[int] = frozenset(),
        joined: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._joined = joined
        self._last_joined = False
        self._ids: list[int] = []
        for token_id in reversed(prompt_ids):
            if not self._is_hidden(token_id):
                self._ids.insert(0, token_id)
                if len(self._ids) == _CONTEXT_TOKENS:
                    break
        self._read = len(self._ids)
        self._shown = self._decode()

    def push(self, ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join([self._push_one(token_id) for token_id in ids])

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        rest = self._decode()[len(self._shown) :]
        self._ids = []
        self._shown = ""
        return rest

    def _push_one(self, token_id: int) -> str:
        if self._is_hidden(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode()
        waiting = len(self._ids) - self._read
        if text.endswith("\ufffd") and waiting < _MAX_PENDING_TOKENS:
            return ""
        delta = text[len(self._shown) :]
        is_joined = token_id in self._joined
        if is_joined and self._last_joined:
            delta = self._tokenizer.id_to_token(token_id) or ""
        self._last_joined = is_joined
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode()
        return delta

    def _is_hidden(self, token_id: int) -> bool:
        if token_id in self._hidden:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)
