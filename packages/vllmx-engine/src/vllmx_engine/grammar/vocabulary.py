"""A model's tokens as grammars need them, and the library's trie of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import tokenizers
from vllmx_core.errors import GrammarError
from vllmx_core.records import Record

from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.grammars import Vocabulary

Trie = Any
"""llguidance.LLTokenizer."""
_SHORT_CHARS = 64
_KEPT_TEXTS = 4096
"""The number of texts kept that grammars force, such as names of properties, which come again in
each answer."""


_BEFORE = "\x02"
"""A character that no token has together with others."""


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits; a second for 150,000 tokens, so not for
    an event loop. Raises GrammarError where a token does not stand for fixed bytes."""
    if tokenizer.all_pieces is None:
        raise GrammarError(
            "this model's tokenizer has no fixed text for each token, so its answers cannot follow"
            " a grammar: leave the grammar out"
        )
    count = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.all_pieces[token] for token in range(count)]
    return Vocabulary(
        tokens=tokens + [b""] * (vocab_size - count),
        special_ids=sorted(token for token in tokenizer.special_ids if token < vocab_size),
        eos_ids=sorted(token for token in eos_ids if 0 <= token < vocab_size),
        tokenizer=tokenizer.backend.to_str(),
    )


class Lexicon(Record):
    """The tokens that grammars are checked against."""

    trie: Trie
    vocab_size: int
    specials: Mapping[str, int]
    """Ids of special tokens by their text."""
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Lexicon:
        """Takes as long as `make_trie`."""
        tokens = vocabulary.tokens
        specials = {tokens[i].decode("utf-8", "replace"): i for i in vocabulary.special_ids}
        specials.pop("", None)
        return cls(make_trie(vocabulary), len(tokens), specials, tuple(vocabulary.eos_ids))

    def token_id(self, given: int | str) -> int | None:
        """The id of a token by its id or its whole text; None where the model has none."""
        if isinstance(given, int):
            return given if given < self.vocab_size else None
        if given in self.specials:
            return self.specials[given]
        ids: list[int] = self.trie.tokenize_str(given)
        return ids[0] if len(ids) == 1 else None


class _Tokens:
    """The tokenizer interface of `LLTokenizer`; for a model without an end of sequence it has one
    that is never sampled."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self.eos_token_ids = list(vocabulary.eos_ids)
        if not self.eos_token_ids:
            self.eos_token_ids = [len(self.tokens)]
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<no end of sequence>")
        self.eos_token_id = self.eos_token_ids[0]
        self._bytes = {data[0]: token for token, data in enumerate(self.tokens) if len(data) == 1}
        self._backend = tokenizers.Tokenizer.from_str(vocabulary.tokenizer)
        self._encode_short = lru_cache(_KEPT_TEXTS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """The ids that the model was trained to read and write for a text."""
        return self._encode_short(text) if len(text) <= _SHORT_CHARS else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids = self._ids(text)
        if not self._is(ids, text):
            # The tokenizer puts a space before a text, which may be in the middle of an answer.
            ids = self._ids(_BEFORE + text)[len(self._ids(_BEFORE)) :]
        if not self._is(ids, text):
            # The text has the character by which the tokenizer writes a space.
            ids = [self._bytes[byte] for byte in text.encode() if byte in self._bytes]
        return ids

    def _is(self, ids: list[int], text: str) -> bool:
        return b"".join(self.tokens[token] for token in ids) == text.encode()

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def make_trie(vocabulary: Vocabulary) -> Trie:
    """Half a second for 150,000 tokens, in which no other thread of the process runs."""
    from llguidance import LLTokenizer

    tokens = _Tokens(vocabulary)
    return LLTokenizer(
        tokens,  # type: ignore[arg-type]
        n_vocab=len(tokens.tokens),
        eos_token=tokens.eos_token_ids,
    )
