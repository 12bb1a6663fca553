"""The most bytes of text in one token, if that is certain: a text of B bytes then has at least
B / `longest` tokens, and what cannot fit into a context is refused without tokenising it.

It is certain for BPE that loses nothing on the way: every byte or character of the text is part of
some token. Normalisers that drop or merge text without bound, pre-tokenisers that drop white space,
models that merge unknown characters and added tokens that swallow the spaces around them have no
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers
from vllmx_core.records import Record

from vllmx_engine.text.pieces import stages_of

PIECE_CHARS = 1 << 18
"""A piece of text has a million tokens at the most, and takes 0.1 s."""
_SEAM_TOKENS = 4096
"""A piece may have so many tokens fewer within its text than alone: a few are usual."""

Count = Callable[[str], int]
"""The tokens of a text."""


def fewest_tokens(texts: Sequence[str], enough: int, count: Count) -> int:
    """A number of tokens that the texts have at least. Nothing is counted behind the piece with
    which there are more than `enough`."""
    found = 0
    for text in texts:
        for _, piece in _pieces(text, from_end=False):
            found += _sure(piece, count)
            if found > enough:
                return found
    return found


def part_with(text: str, num_tokens: int, count: Count, *, from_end: bool) -> str:
    """The beginning of a text, or its end, that has more than so many tokens; the whole text where
    it has no more."""
    found = 0
    for size, piece in _pieces(text, from_end=from_end):
        found += _sure(piece, count)
        if found > num_tokens:
            return text[-size:] if from_end else text[:size]
    return text


def _sure(piece: str, count: Count) -> int:
    return max(0, count(piece) - _SEAM_TOKENS)


def _pieces(text: str, *, from_end: bool) -> Iterator[tuple[int, str]]:
    """The pieces in the order in which they are looked at, each with the number of characters up to
    its far end."""
    for begin in range(0, len(text), PIECE_CHARS):
        size = min(begin + PIECE_CHARS, len(text))
        first = len(text) - size if from_end else begin
        yield size, text[first : first + size - begin]


_NFC_SHRINKS = 4
"""The most bytes of a text over those of its NFC form; Hangul syllables reach 3."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
"""Pre-tokenisers that drop nothing; those that may, say so in their "behavior"."""
_SPLITTING = ("Split", "Punctuation")


class TokenBound(Record):
    """`longest`: of the text of one token, in bytes or in characters."""

    longest: int
    in_bytes: bool

    def fewest_tokens(self, text: str) -> int:
        """No tokenisation of the text has fewer."""
        size = len(text.encode("utf-8", "surrogatepass")) if self.in_bytes else len(text)
        return -(-size // self.longest)


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    """The bound of this tokenizer; None where there is none."""
    steps = stages_of(backend.pre_tokenizer, "pretokenizers")
    if not all(_keeps_all(step) for step in steps):
        return None
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    shrinks = _shrinks(stages_of(backend.normalizer, "normalizers"), in_bytes=in_bytes)
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinks is None or strips or not _spells_everything(backend, in_bytes=in_bytes):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
    of_added = (len(token.content.encode() if in_bytes else token.content) for token in added)
    return TokenBound(shrinks * max(longest, *of_added, 1), in_bytes)


def _keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] in _SPLITTING:
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING


def _shrinks(steps: list[dict[str, Any]], *, in_bytes: bool) -> int | None:
    """The factor by which normalising can shorten a text; None: any factor."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC" and in_bytes:
            factor *= _NFC_SHRINKS
        elif step["type"] == "Replace" and not in_bytes:
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _spells_everything(backend: tokenizers.Tokenizer, *, in_bytes: bool) -> bool:
    """True if each byte has a token of its own, so that the model knows every text."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if in_bytes:
        pieces = pre_tokenizers.ByteLevel.alphabet()
    elif model.byte_fallback:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(model.token_to_id(piece) is not None for piece in pieces)
