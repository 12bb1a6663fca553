"""Events of a parsed answer in text order, and the interfaces that receive its parts."""

from __future__ import annotations

from typing import Protocol

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


class CallSink(Protocol):
    """Told of calls."""

    def begin(self, name: str, call_id: str | None) -> None:
        """The name is known; nothing of the call is content any more."""
        ...

    def arguments(self, text: str) -> None:
        """JSON text of the arguments that follows."""
        ...

    def end(self) -> None:
        """The call is complete."""
        ...


class AnswerSink(CallSink, Protocol):
    """Told of everything."""

    def content(self, text: str) -> None:
        """Content that follows."""
        ...

    def unread_call(self) -> None:
        """Something began as a call and was none that can be read."""
        ...

    def begin_reasoning(self) -> None:
        """Thoughts begin."""
        ...

    def reasoning(self, text: str) -> None:
        """Thoughts that follow."""
        ...

    def end_reasoning(self) -> None:
        """Thoughts are complete."""
        ...
