"""Messages about grammars: to the process that checks them, and to the core that applies them.

A `GrammarSpec` is a user's request. The grammar process answers with its `Grammar`, in the form of
the library with which the core compiles it again.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on an answer."""

    kind: GrammarKind
    text: str
    """JSON for schemas, lists of choices and structural tags; else the grammar itself."""
    compact: bool = False
    """JSON has no blanks between its tokens."""
    whitespace: str | None = None
    """A regular expression for such blanks, instead of the bounded usual one."""

    @property
    def digest(self) -> bytes:
        """Equal for equal grammars."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class Thoughts(msgspec.Struct, frozen=True, array_like=True):
    """The budget of an answer's reasoning."""

    most_tokens: int
    begin_ids: tuple[int, ...]
    """An answer that begins with them thinks; empty: it does from its first token on."""
    end_ids: tuple[int, ...]


class FreePart(msgspec.Struct, frozen=True, array_like=True):
    """The part before an answer's grammar: reasoning, and headers of messages."""

    ends: tuple[tuple[int, ...], ...]
    """Token ids; the form holds from behind the first of them that comes."""
    begin_ids: tuple[int, ...] = ()
    """An answer that begins otherwise has no such part; empty: every answer has it."""
    held_ids: tuple[int, ...] = ()
    """Tokens that may not come in it: ends of the sequence, where the form must follow."""


class SpeechRules(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a transcription may have."""

    never: tuple[int, ...]
    not_first: tuple[int, ...]
    """Tokens that may not come first."""
    end_id: int
    """The end of the text; special tokens follow it in the vocabulary."""
    first_timestamp: int = -1
    """All ids from here on are timestamps; -1: there shall be none."""
    most_initial: int = 50
    """The first timestamp is at most so many behind `first_timestamp`."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that was found sound, as the core gets it with a request."""

    text: str
    """Empty: the answer has no form, only bounds."""
    free: FreePart | None = None
    """None: the grammar holds from the first token on."""
    thoughts: Thoughts | None = None
    speech: SpeechRules | None = None
    """The rules of a transcription, which has no text, nor thoughts."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary"):
    """The tokens of a model that grammars need. Sent once, before any grammar."""

    tokens: list[bytes]
    """The bytes of each id, as many as the model has logits; empty where an id stands for no text.
    """
    special_ids: list[int]
    eos_ids: list[int]
    tokenizer: str
    """JSON of the tokenizer, which finds the usual tokens of a text that is forced."""


class CheckGrammar(msgspec.Struct, frozen=True, tag="check"):
    """Answered by Verdict."""

    call_id: int
    spec: GrammarSpec


ToGrammars = Vocabulary | CheckGrammar


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """The verdict on a grammar: what it is for the core, or why it cannot be followed."""

    call_id: int
    text: str | None = None
    error: str | None = None
    is_open: bool = False
    """The check did not end for want of processor time or memory: `error` says which."""


to_grammars_decoder: msgspec.msgpack.Decoder[ToGrammars] = msgspec.msgpack.Decoder(ToGrammars)
verdict_decoder: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
