"""How much text one token can stand for, where that is certain: a text of B bytes then has at least
B / `longest` tokens, and what cannot fit into a context is refused without tokenising it.

It is certain for BPE that loses nothing on the way: every byte or character of the text is part of
some token. Normalisers that drop or merge text without bound, pre-tokenisers that drop white space,
models that merge unknown characters and added tokens that swallow the spaces beside them have no
bound.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers
from vllmx_core.records import Record

_NFC_SHRINKS = 4
"""A text's bytes over those of its NFC form, at most; Hangul syllables come to 3."""
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
    steps = _stages(backend.pre_tokenizer, "pretokenizers")
    if not all(_keeps_all(step) for step in steps):
        return None
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    shrinks = _shrinks(_stages(backend.normalizer, "normalizers"), in_bytes=in_bytes)
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinks is None or strips or not _spells_everything(backend, in_bytes=in_bytes):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
    of_added = (len(token.content.encode() if in_bytes else token.content) for token in added)
    return TokenBound(shrinks * max(longest, *of_added, 1), in_bytes)


def _stages(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokeniser, as tokenizer.json writes them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state[name] if state["type"] == "Sequence" else [state]
    return steps


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
    """Whether each byte has a token of its own, so that nothing is unknown to the model."""
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
