"""The bytes that each token id adds to a decoded text.

`tokenizers` decodes a list of ids by a pipeline over token strings. For the two families that
nearly all generating models use, that pipeline is a plain concatenation of bytes per token,
followed by a UTF-8 decode that replaces what is invalid:

* byte-level BPE (decoder `ByteLevel`): the token's characters stand for bytes; an added token with
  any other character stands for itself; invalid bytes become U+FFFD per maximal subpart.
* SentencePiece style (decoder `Replace`*, `ByteFallback`, `Fuse`, optionally `Strip` at the left):
  `<0xNN>` is one byte, anything else its text after the replacements; an invalid byte becomes one
  U+FFFD each.

`ByteFallback` itself rejects a whole run of byte tokens when any byte of it is invalid, which no
stream can do without holding back an unbounded text; here the valid characters of such a run are
kept, as SentencePiece's own decoder does. All valid text is the same.

Other decoders (WordPiece, Metaspace, ...) have no coding, and are decoded through a window of ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import tokenizers
from vllmx_core.records import Record

EACH_BYTE = "vllmx.replace_each_byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class PieceCoding(Record):
    """Converts token strings into bytes, and bytes into text."""

    to_bytes: Callable[[str], bytes]
    errors: str
    """Error handler of the UTF-8 decode of the concatenated bytes."""
    strip_char: str = " "
    strip_count: int = 0
    """The number of `strip_char` that are removed at the left end of the whole text."""


def piece_coding(backend: tokenizers.Tokenizer) -> PieceCoding | None:
    """The coding for this tokenizer's decoder, or None where bytes per token do not describe it."""
    stages = stages_of(backend.decoder, "decoders")
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return PieceCoding(_byte_level_bytes, "replace")
    return _sentencepiece_coding(stages)


def stages_of(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, as tokenizer.json writes them. `name`: that of the list
    in a part of several."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        if state["type"] == "Sequence":
            return [stage for each in state[name] for stage in flat(each)]
        return [state]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _sentencepiece_coding(stages: list[dict[str, Any]]) -> PieceCoding | None:
    """Accepts exactly Replace*, ByteFallback?, Fuse, Strip?; order matters."""
    rest = list(stages)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace":
        stage = rest.pop(0)
        pattern = stage["pattern"].get("String")
        if not pattern:
            return None
        replacements.append((pattern, stage["content"]))
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    to_bytes = partial(
        _replaced_bytes, replacements=tuple(replacements), byte_fallback=byte_fallback
    )
    if not rest:
        return PieceCoding(to_bytes, EACH_BYTE)
    strip = rest.pop(0)
    if rest or strip["type"] != "Strip" or strip["stop"] != 0:
        return None
    return PieceCoding(to_bytes, EACH_BYTE, strip["content"], strip["start"])


def _replaced_bytes(
    token: str, *, replacements: tuple[tuple[str, str], ...], byte_fallback: bool
) -> bytes:
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    if byte_fallback:
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes((int(match[1], 16),))
    return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


class PieceTable(dict[int, bytes]):
    """id -> bytes in a decoded text, filled at first use and shared by all sequences.

    Ids without a token (a model's vocabulary is often padded) and, with `skipped`, special tokens
    contribute nothing, as in `tokenizers.Tokenizer.decode`.
    """

    def __init__(
        self, names: Callable[[int], str | None], coding: PieceCoding, skipped: frozenset[int]
    ) -> None:
        super().__init__()
        self._name_of = names
        self._coding = coding
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._name_of(token_id)
        piece = b"" if token is None or token_id in self._skipped else self._coding.to_bytes(token)
        self[token_id] = piece
        return piece


class TextTable(dict[int, "str | None"]):
    """id -> text of the token where its bytes are whole characters, else None."""

    def __init__(self, pieces: PieceTable) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text
