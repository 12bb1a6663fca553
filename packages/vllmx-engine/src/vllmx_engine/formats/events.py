"""What an answer turns out to hold, in the order of its text."""

from __future__ import annotations

import msgspec


class ReasoningPiece(msgspec.Struct, frozen=True, gc=False):
    """Thoughts that follow."""

    text: str


class ContentPiece(msgspec.Struct, frozen=True, gc=False):
    """Content that follows."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool begins; its arguments follow."""

    index: int
    id: str
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call is complete."""

    index: int


Event = ReasoningPiece | ContentPiece | CallBegin | ArgumentsPiece | CallEnd
